"""Model types that transformers 5.12 supports only by code in their checkpoints, which a run never executes."""

from typing import Any


def register_model_types() -> None:
    """Register `kimi_k2` with transformers as another name of `deepseek_v3`."""
    from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM
    from transformers.conversion_mapping import (
        get_checkpoint_conversion_mapping,
        register_checkpoint_conversion_mapping,
    )
    from transformers.models.deepseek_v3 import modeling_deepseek_v3
    from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config

    if "kimi_k2" in CONFIG_MAPPING:
        return

    class KimiK2Config(DeepseekV3Config):
        model_type = "kimi_k2"

        def __reduce__(self) -> tuple[Any, ...]:  # processes that are spawned get it, and do not have this class yet
            return _new_kimi_k2, (), self.__dict__

    class DeepseekV3ForCausalLM(modeling_deepseek_v3.DeepseekV3ForCausalLM):  # the architecture of its checkpoints
        config_class = KimiK2Config

    AutoConfig.register("kimi_k2", KimiK2Config)
    AutoModelForCausalLM.register(KimiK2Config, DeepseekV3ForCausalLM)
    register_checkpoint_conversion_mapping("kimi_k2", get_checkpoint_conversion_mapping("deepseek_v3"))


def _new_kimi_k2() -> Any:
    from transformers import CONFIG_MAPPING

    register_model_types()
    return CONFIG_MAPPING["kimi_k2"]()
