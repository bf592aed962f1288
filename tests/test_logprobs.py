from __future__ import annotations

import copy
import math
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from peft import LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    CohereConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GptOssConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    MambaConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3Config,
)

from envgrad.attention import IMPLEMENTATION, use_envgrad_attention
from envgrad.errors import ConfigurationError
from envgrad.logprobs import (
    PolicyForward,
    PolicyInputs,
    check_packed_forward,
    install_policy_forward,
    policy_logprobs,
)
from envgrad.packing import MicroBatch, PackMode, pack
from envgrad.types import TrainingSample

VOCABULARY = 60
COMMON = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256,
}  # fmt: skip
WINDOWED = {**COMMON, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
GPT2 = GPT2Config(vocab_size=VOCABULARY, n_embd=16, n_layer=2, n_head=4, n_positions=256)


def tiny(config: PretrainedConfig, *, attention: bool = True) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    if attention:
        use_envgrad_attention(model)
    return model.eval()


def llama(**options: object) -> PreTrainedModel:
    return tiny(LlamaConfig(**{**COMMON, **options}))


def sample(group: str, tokens: list[int], prompt: int) -> TrainingSample:
    size = len(tokens)
    return TrainingSample(
        token_ids=tuple(tokens), mask=(0,) * prompt + (1,) * (size - prompt), logprobs=(0.0,) * size,
        versions=(0,) * size, advantages=(0.0,) * prompt + (1.0,) * (size - prompt), prompt_length=prompt, group=group,
    )  # fmt: skip


SAMPLES = [
    sample("a", [1, 2, 3, 4, 5, 6], 3),
    sample("a", [1, 2, 3, 9, 8], 3),
    sample("b", [7, 11, 12, 13], 1),
]


def micro_batch(mode: PackMode = "shared") -> MicroBatch:
    return pack(SAMPLES, [1.0] * 3, mode=mode).micro_batches[0]


def plain(model: nn.Module, temperature: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and entropies by plain forwards of whole rows."""
    logprobs, entropies = [], []
    for row in SAMPLES:
        logits = model(input_ids=torch.tensor([row.token_ids])).logits[0]
        logs = (logits.float() / temperature).log_softmax(-1)[row.prompt_length - 1 : -1]
        targets = torch.tensor(row.token_ids[row.prompt_length :])
        logprobs.append(logs[torch.arange(len(targets)), targets])
        entropies.append(torch.distributions.Categorical(logits=logs).entropy())
    return torch.cat(logprobs), torch.cat(entropies)


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
@pytest.mark.parametrize("config", [LlamaConfig(**COMMON), GPT2], ids=["llama", "gpt2"])
def test_logprobs_and_entropy_of_the_tempered_distribution(config: PretrainedConfig, temperature: float) -> None:
    model = tiny(config)
    assert install_policy_forward(model).path == "head"
    outputs = policy_logprobs(model, micro_batch(), temperature=temperature, entropy="metric")
    logprobs, entropy = plain(model, temperature)
    assert torch.allclose(outputs.logprobs, logprobs, atol=1e-5)
    assert outputs.entropy is not None and torch.allclose(outputs.entropy, entropy, atol=1e-5)
    assert outputs.logprobs.requires_grad and not outputs.entropy.requires_grad
    assert policy_logprobs(model, micro_batch()).entropy is None


def test_temperature_must_be_positive() -> None:
    with pytest.raises(ConfigurationError, match=r"temperature=0.* must be above 0"):
        policy_logprobs(llama(), micro_batch(), temperature=0.0)


@pytest.mark.parametrize(
    "config",
    [CohereConfig(**COMMON, logit_scale=0.3), Gemma2Config(**WINDOWED, final_logit_softcapping=2.0)],
    ids=["cohere", "gemma2"],
)
def test_models_that_change_their_logits_keep_them(config: PretrainedConfig) -> None:
    model = tiny(config, attention=False)
    assert install_policy_forward(model).path == "logits"
    found = [
        policy_logprobs(model, part, entropy="metric")
        for part in pack(SAMPLES, [1.0] * 3, mode="single").micro_batches
    ]  # fmt: skip
    logprobs, entropy = plain(model)
    assert torch.allclose(torch.cat([part.logprobs for part in found]), logprobs, atol=1e-5)
    assert torch.allclose(torch.cat([part.entropy for part in found if part.entropy is not None]), entropy, atol=1e-5)


def test_other_calls_are_as_before_and_uninstall_leaves_nothing() -> None:
    model = llama()
    ids = torch.tensor([[1, 2, 3]])
    logits, generated = model(ids).logits, model.generate(ids, max_new_tokens=4, do_sample=False)
    forward = install_policy_forward(model)
    assert install_policy_forward(model) is forward
    assert torch.equal(model(ids).logits, logits) and torch.equal(model(input_ids=ids).logits, logits)
    assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False), generated)
    forward.uninstall()
    assert "forward" not in vars(model)
    with pytest.raises((TypeError, ValueError)):
        policy_logprobs(model, micro_batch())


def test_uninstall_gives_back_a_forward_of_someone_else() -> None:
    model = llama()
    calls: list[int] = []
    original = model.forward

    def counted(*args: object, **kwargs: object) -> object:
        calls.append(1)
        return original(*args, **kwargs)

    model.forward = counted
    forward = install_policy_forward(model)
    calls.clear()
    model(torch.tensor([[1]]))
    assert calls == [1]
    forward.uninstall()
    assert model.forward is counted


def test_installing_moves_no_mode_and_no_random_state() -> None:
    model = llama().train()
    model.model.layers[0].eval()
    state = torch.get_rng_state()
    install_policy_forward(model)
    assert check_packed_forward(model) is None
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training and not model.model.layers[0].training and model.model.layers[1].training
    assert all(parameter.grad is None for parameter in model.parameters())


def test_copies_and_pickles_have_a_policy_forward_of_their_own() -> None:
    model = llama()
    install_policy_forward(model)
    before = policy_logprobs(model, micro_batch()).logprobs
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        forward = vars(other)["forward"]
        assert isinstance(forward, PolicyForward) and forward.model is other
        assert torch.equal(policy_logprobs(other, micro_batch()).logprobs, before)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.zero_()
        assert torch.equal(policy_logprobs(model, micro_batch()).logprobs, before)
        assert torch.allclose(policy_logprobs(other, micro_batch()).logprobs, torch.tensor(-math.log(VOCABULARY)))


def test_saved_models_load_without_us(tmp_path: Path) -> None:
    model = llama()
    install_policy_forward(model)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is LlamaForCausalLM and loaded.config.architectures == ["LlamaForCausalLM"]
    assert torch.allclose(policy_logprobs(model, micro_batch()).logprobs, plain(loaded)[0], atol=1e-5)


@pytest.mark.parametrize("targets", [["q_proj", "v_proj"], ["q_proj", "lm_head"]])
def test_lora_through_the_peft_wrapper(targets: list[str]) -> None:
    model = get_peft_model(llama(), LoraConfig(r=2, target_modules=targets, init_lora_weights=False))
    assert isinstance(model, PeftModel)
    install_policy_forward(model)
    model.eval()
    logprobs = policy_logprobs(model, micro_batch()).logprobs
    assert torch.allclose(logprobs, plain(model)[0], atol=1e-5)
    with model.disable_adapter():
        assert not torch.allclose(logprobs, policy_logprobs(model, micro_batch()).logprobs, atol=1e-3)
        assert torch.allclose(policy_logprobs(model, micro_batch()).logprobs, plain(model)[0], atol=1e-5)
    logprobs.sum().backward()
    ours = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    assert ours and all("lora" in name for name in ours)
    model.zero_grad()
    plain(model)[0].sum().backward()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None
            assert torch.allclose(ours[name], parameter.grad, atol=1e-4)


def test_what_cannot_carry_a_policy_forward_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="no decoder with a language-model head"):
        install_policy_forward(LlamaModel(LlamaConfig(**COMMON)))
    prompts = get_peft_model(llama(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    with pytest.raises(ConfigurationError, match="learns prompts"):
        install_policy_forward(prompts)
    with pytest.raises(ConfigurationError, match="transformers or PEFT model, got Linear"):
        install_policy_forward(nn.Linear(2, 2))  # type: ignore[arg-type]


def test_distributed_data_parallel_sees_the_whole_computation(tmp_path: Path) -> None:
    """In a process of its own, which ends without gloo's destructors: they may wait for each other for ever."""
    tests = str(Path(__file__).parent)
    code = f"import os, test_logprobs as tests; tests.train_under_ddp({str(tmp_path)!r}); os._exit(0)"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([tests, *sys.path])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def train_under_ddp(folder: str) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    model = llama()
    install_policy_forward(model)
    expected = policy_logprobs(model, micro_batch(), entropy="grad")
    wrapped = DistributedDataParallel(model)  # raises in the second forward if a parameter were not used
    for _ in range(2):
        outputs = policy_logprobs(wrapped, micro_batch(), entropy="grad")
        assert torch.equal(outputs.logprobs, expected.logprobs)
        assert outputs.entropy is not None
        (outputs.logprobs.sum() + outputs.entropy.sum()).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_policy_inputs_are_opaque_to_wrappers() -> None:
    inputs = PolicyInputs(micro_batch(), temperature=1.0, entropy="none")
    for value in (inputs, inputs.layout):
        assert not hasattr(value, "__dataclass_fields__") and not isinstance(value, tuple | dict | list)


def test_autocast_computes_in_low_precision_and_returns_float32() -> None:
    model = llama()
    install_policy_forward(model)
    expected = policy_logprobs(model, micro_batch()).logprobs
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outputs = policy_logprobs(model, micro_batch(), entropy="grad")
        assert outputs.logprobs.dtype == torch.float32
    assert outputs.entropy is not None
    (outputs.logprobs.sum() + outputs.entropy.sum()).backward()
    difference = (outputs.logprobs - expected).abs().max()
    assert 1e-5 < difference < 0.2
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_accelerate_wraps_around_it() -> None:
    model = llama()
    install_policy_forward(model)
    expected = policy_logprobs(model, micro_batch()).logprobs
    AcceleratorState._reset_state(True)
    try:
        accelerator = Accelerator(mixed_precision="bf16", cpu=True)
        wrapped = accelerator.prepare(model)
        outputs = policy_logprobs(wrapped, micro_batch(), entropy="metric")
        assert outputs.logprobs.dtype == torch.float32 and outputs.entropy is not None
        assert 1e-5 < (outputs.logprobs - expected).abs().max() < 0.2
        assert accelerator.unwrap_model(wrapped) is model
    finally:
        AcceleratorState._reset_state(True)


# The packed check

PACKABLE = {
    "llama": LlamaConfig(**COMMON),
    "qwen3": Qwen3Config(**COMMON),
    "gpt2": GPT2,
    "gemma3": Gemma3TextConfig(**WINDOWED),
}
OTHER = {
    "softcapped": Gemma2Config(**WINDOWED, attn_logit_softcapping=1.0),
    "sinks": GptOssConfig(**WINDOWED, num_local_experts=2, num_experts_per_tok=1),
    "alibi": BloomConfig(vocab_size=VOCABULARY, hidden_size=16, n_layer=2, n_head=4),
    "recurrent": MambaConfig(vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=2, state_size=4),
}


@pytest.mark.parametrize("name", list(PACKABLE))
def test_models_that_can_be_packed_pass(name: str) -> None:
    model = tiny(PACKABLE[name], attention=False)
    before = model.config._attn_implementation
    assert check_packed_forward(model) is None
    assert model.config._attn_implementation == before


@pytest.mark.parametrize("name", list(OTHER))
def test_models_that_attend_otherwise_are_found_and_still_train_one_row_at_a_time(name: str) -> None:
    model = tiny(OTHER[name], attention=False)
    before = model.config._attn_implementation
    reason = check_packed_forward(model)
    assert reason is not None and type(model).__name__ in reason
    assert model.config._attn_implementation == before
    install_policy_forward(model)
    parts = pack(SAMPLES, [1.0] * 3, mode="single").micro_batches
    logprobs = torch.cat([policy_logprobs(model, part).logprobs for part in parts])
    assert torch.allclose(logprobs, plain(model)[0], atol=1e-5)


def test_dropout_does_not_disturb_the_probes() -> None:
    model = tiny(GPT2, attention=False).train()
    assert GPT2.attn_pdrop > 0 and check_packed_forward(model) is None
    assert install_policy_forward(model).path == "head"


def test_the_reference_is_the_model_as_it_was_written_even_if_it_carries_our_attention() -> None:
    model = tiny(OTHER["sinks"], attention=True)
    reason = check_packed_forward(model)
    assert reason is not None and "not a plain softmax" in reason
    assert model.config._attn_implementation == IMPLEMENTATION


def test_a_broken_window_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny(PACKABLE["gemma3"], attention=False)
    monkeypatch.setattr("envgrad.layout.PackedLayout._mask", lambda self, prefix, longest, window, like: None)
    reason = check_packed_forward(model)
    assert reason is not None and "differs from its plain one" in reason


def test_half_precision_has_a_wider_limit() -> None:
    assert check_packed_forward(tiny(PACKABLE["llama"], attention=False).to(torch.bfloat16)) is None
