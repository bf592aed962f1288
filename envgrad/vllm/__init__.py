"""What runs inside vLLM's own process, in vLLM's environment: it needs nothing of ours but the files in this folder.

``envgrad vllm-serve`` puts :data:`EXTENSION_PATH` on that process's ``PYTHONPATH``. The modules there import the
standard library, torch and safetensors, and no other file of envgrad.
"""

from __future__ import annotations

from pathlib import Path

EXTENSION_PATH = Path(__file__).parent
"""the folder to put on ``PYTHONPATH`` of vLLM's process"""
WORKER_EXTENSION = "envgrad_vllm_worker.WeightSync"
"""value of vLLM's ``--worker-extension-cls``"""
GUARD = "envgrad_vllm_guard.Guard"
"""value of vLLM's ``--middleware``: asks every path for the key, where vLLM asks for it under /v1 only"""
