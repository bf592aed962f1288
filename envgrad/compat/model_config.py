"""``ModelConfig`` and what is read off it: adapters and quantization."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING

from envgrad.errors import ConfigurationError

if TYPE_CHECKING:
    from peft import LoraConfig
    from transformers import BitsAndBytesConfig

DTYPES = ("auto", "bfloat16", "float16", "float32")
FOUR_BIT_TYPES = ("fp4", "nf4")


@dataclass
class ModelConfig:
    """Which model a script trains and how it is loaded; fields of trl's class of that name.

    Raises:
        ConfigurationError: an unknown ``dtype`` or quantization type, or 8 and 4 bit at once.

    Example:
        >>> ModelConfig(model_name_or_path="starter", lora_target_modules=["all-linear"]).lora_target_modules
        'all-linear'
    """

    model_name_or_path: str | None = field(default=None, metadata={"help": "Name or path of the model."})
    model_revision: str = field(default="main", metadata={"help": "Branch, tag or commit of the model."})
    dtype: str | None = field(
        default="float32", metadata={"help": "Precision the weights are loaded in.", "choices": list(DTYPES)}
    )
    attn_implementation: str | None = field(
        default=None, metadata={"help": "Attention of the model; envgrad's own unless a model cannot have it."}
    )
    use_peft: bool = field(default=False, metadata={"help": "Train LoRA adapters only."})
    lora_r: int = field(default=16, metadata={"help": "Rank of the adapters."})
    lora_alpha: int = field(default=32, metadata={"help": "Scale of the adapters."})
    lora_dropout: float = field(default=0.05, metadata={"help": "Dropout in front of the adapters."})
    lora_target_modules: list[str] | None = field(default=None, metadata={"help": "Modules that get adapters."})
    lora_target_parameters: list[str] | None = field(default=None, metadata={"help": "Parameters that get adapters."})
    lora_modules_to_save: list[str] | None = field(default=None, metadata={"help": "Modules trained whole."})
    lora_task_type: str = field(default="CAUSAL_LM", metadata={"help": "Task type of the adapters."})
    use_rslora: bool = field(default=False, metadata={"help": "Scale adapters by alpha / sqrt(r)."})
    use_dora: bool = field(default=False, metadata={"help": "Train magnitudes beside directions (DoRA)."})
    load_in_8bit: bool = field(default=False, metadata={"help": "Quantize the base model to 8 bit."})
    load_in_4bit: bool = field(default=False, metadata={"help": "Quantize the base model to 4 bit."})
    bnb_4bit_quant_type: str = field(
        default="nf4", metadata={"help": "Form of the 4 bit numbers.", "choices": list(FOUR_BIT_TYPES)}
    )
    use_bnb_nested_quant: bool = field(default=False, metadata={"help": "Quantize the 4 bit scales too."})
    bnb_4bit_quant_storage: str | None = field(default=None, metadata={"help": "Type that 4 bit numbers are kept in."})

    def __post_init__(self) -> None:
        if self.load_in_8bit and self.load_in_4bit:
            raise ConfigurationError("load_in_8bit and load_in_4bit are both on; a model has one precision, choose one")
        if self.dtype is not None and self.dtype not in DTYPES:
            raise ConfigurationError(f"dtype={self.dtype!r} is not known; choose one of {', '.join(DTYPES)}")
        if self.bnb_4bit_quant_type not in FOUR_BIT_TYPES:
            raise ConfigurationError(
                f"bnb_4bit_quant_type={self.bnb_4bit_quant_type!r} is not known; choose fp4 or nf4"
            )
        # A list of one is a pattern, or peft's name for a set of modules ("all-linear").
        if isinstance(self.lora_target_modules, list) and len(self.lora_target_modules) == 1:
            self.lora_target_modules = self.lora_target_modules[0]  # type: ignore[assignment]


def get_peft_config(model_args: ModelConfig) -> LoraConfig | None:
    """The adapters that ``model_args`` asks for; None without ``use_peft``.

    Raises:
        ConfigurationError: ``use_peft=True`` and peft is not installed.

    Example:
        >>> get_peft_config(ModelConfig()) is None
        True
        >>> get_peft_config(ModelConfig(use_peft=True, lora_r=4)).r
        4
    """
    if not model_args.use_peft:
        return None
    try:
        from peft import LoraConfig
    except ImportError as error:
        raise ConfigurationError("use_peft=True needs the peft package: pip install 'envgrad[peft]'") from error
    return LoraConfig(
        task_type=model_args.lora_task_type,
        r=model_args.lora_r,
        lora_alpha=model_args.lora_alpha,
        lora_dropout=model_args.lora_dropout,
        target_modules=model_args.lora_target_modules,
        target_parameters=model_args.lora_target_parameters,
        modules_to_save=model_args.lora_modules_to_save,
        use_rslora=model_args.use_rslora,
        use_dora=model_args.use_dora,
    )


def get_quantization_config(model_args: ModelConfig) -> BitsAndBytesConfig | None:
    """The quantization that ``model_args`` asks for; None without ``load_in_8bit`` and ``load_in_4bit``.

    Raises:
        ConfigurationError: it asks for one and bitsandbytes is not installed.

    Example:
        >>> get_quantization_config(ModelConfig()) is None
        True
    """
    if not (model_args.load_in_8bit or model_args.load_in_4bit):
        return None
    if find_spec("bitsandbytes") is None:
        name = "load_in_8bit" if model_args.load_in_8bit else "load_in_4bit"
        raise ConfigurationError(f"{name}=True needs the bitsandbytes package: pip install bitsandbytes")
    from transformers import BitsAndBytesConfig

    if model_args.load_in_8bit:
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=model_args.bnb_4bit_quant_type,
        bnb_4bit_use_double_quant=model_args.use_bnb_nested_quant,
        # Products are computed in the precision of the other weights; "auto" leaves that to bitsandbytes.
        bnb_4bit_compute_dtype=None if model_args.dtype == "auto" else model_args.dtype,
        bnb_4bit_quant_storage=model_args.bnb_4bit_quant_storage,
    )
