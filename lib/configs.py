"""Architectures from the config.json that a Hugging Face model comes with.

What the fields of a family mean is in `families`; here are the file, a nested text_config, and the formats that weights
are published in. Image towers and modules that predict further tokens are not counted."""

import json
import re
from pathlib import Path
from reprlib import repr as short

from .families import FAMILIES, count, flag, read_blocks
from .formats import Format, Precision
from .models import Model

FILE_LIMIT = 4 * 2**20  # bytes
QUANTIZED = ("quantization_config", "compression_config")  # the same, by its old name
SHARED = ("tie_word_embeddings", "dtype", "torch_dtype", *QUANTIZED)  # in text_config or around it
DTYPES = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}
SMALL = {"lm_head", "embed_tokens", "gate", "router", "shared_expert_gate", "e_score_correction_bias"}
OUTSIDE = {"visual", "vision_tower", "vision_model", "multi_modal_projector"}


def from_config(path_or_dict, name=None):
    """The model that a config.json describes: its path, its folder, or its contents as a dict. A nested text_config is
    the model; the dtype and quantization_config set its native precision.

    ValueError names the field that is missing, malformed or not supported."""
    outer = path_or_dict if isinstance(path_or_dict, dict) else _loaded(path_or_dict)
    given = outer if outer.get("text_config") is None else outer["text_config"]
    if not isinstance(given, dict):
        raise ValueError(f"text_config must be an object, got {short(given)}")
    kind = given.get("model_type", outer.get("model_type"))
    if outer.get("is_encoder_decoder") or given.get("is_encoder_decoder"):
        raise ValueError(f"is_encoder_decoder: {short(kind)} has an encoder, and only decoders are modelled")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise ValueError(f"model_type {short(kind)} has no reader; families: {', '.join(FAMILIES)}")
    config = {**FAMILIES[kind].defaults, **given, **_shared(outer, given), "model_type": kind}
    blocks = read_blocks(config)
    context = None if config.get("max_position_embeddings") is None else count(config, "max_position_embeddings")
    name = name or (kind if path_or_dict is outer else Path(path_or_dict).stem)
    widths = count(config, "hidden_size"), count(config, "vocab_size")
    return Model(name, *widths, blocks, flag(config, "tie_word_embeddings"), _native(config), context)


def _loaded(path):
    if not isinstance(path, str | Path):
        raise ValueError(f"a config is a dict or the path of a config.json, got {short(path)}")
    try:
        path = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
        with open(path, "rb") as file:
            text = file.read(FILE_LIMIT + 1)
        config = json.loads(text) if len(text) <= FILE_LIMIT else None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except RecursionError:
        raise ValueError(f"{path} is not a config.json: nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    if len(text) > FILE_LIMIT:
        raise ValueError(f"{path} is not a config.json: larger than {FILE_LIMIT} bytes")
    if not isinstance(config, dict):
        raise ValueError(f"{path} must hold a JSON object, got {short(config)}")
    return config


def _shared(*parts):
    """Fields that stand in text_config or around it, but not with two values."""
    found = {}
    for key, value in ((key, part.get(key)) for part in parts for key in SHARED):
        if value is not None and found.setdefault(key, value) != value:
            raise ValueError(f"{key} of text_config contradicts that of the whole model")
    return found


def _native(config):
    """The formats of the weights: a quantizer takes the matrices of the layers, the tables stay in the dtype."""
    dtype = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"torch_dtype {short(dtype)} is not one of {', '.join(DTYPES)}")
    plain, given = DTYPES[dtype], next((config[key] for key in QUANTIZED if config.get(key) is not None), None)
    if given is None:
        return Precision(plain)
    if not isinstance(given, dict):
        raise ValueError(f"quantization_config must be an object, got {short(given)}")
    method = given.get("quant_method")
    if not isinstance(method, str) or method not in METHODS:
        known = ", ".join(METHODS)
        raise ValueError(f"quantization_config.quant_method {short(method)} is not read; known: {known}")
    if (method == "mxfp4") != (config["model_type"] == "gpt_oss"):
        raise ValueError(f"quantization_config.quant_method {method!r} of a {config['model_type']} is not read")
    kept = _kept(given)
    if method == "mxfp4":
        return Precision(plain, ffn="mxfp4")
    weights = METHODS[method](given)
    whole = method != "compressed-tensors" or "lm_head" in kept or flag(config, "tie_word_embeddings")
    attention, head = plain if "self_attn" in kept else None, plain if whole else weights
    return Precision(weights, attention=attention, embedding=plain, head=head)


def _kept(given):
    """What a quantizer leaves as it is: the head, small parts and attention of all layers. ValueError for more."""
    found = set()
    for key in ("modules_to_not_convert", "ignored_layers", "ignore"):
        modules = given.get(key) or []
        if not isinstance(modules, list) or not all(isinstance(module, str) for module in modules):
            raise ValueError(f"quantization_config.{key} must be a list of module names, got {short(modules)}")
        for module in modules:
            parts = re.findall(r"\w+", module)
            last = parts[-1] if parts else ""
            everywhere = not any(part.isdigit() for part in parts)
            if not (last in SMALL or last.endswith("norm") or OUTSIDE & {*parts} or last == "self_attn" and everywhere):
                raise ValueError(f"quantization_config.{key}: {short(module)} in another format is not modelled")
            found.add(last)
    return found


def _fp8(given):
    block = given.get("weight_block_size")
    if block not in (None, [128, 128]):
        raise ValueError(f"quantization_config.weight_block_size {short(block)} is not read, only [128, 128]")
    return "fp8" if block is None else "fp8b128"


def _integers(bits, group, zeros):
    """Integers with a 16-bit scale, and a zero point of their own width, for each group of values."""
    if type(bits) is not int or bits not in (4, 8):
        raise ValueError(f"quantization_config: {short(bits)} bits are not read, only 4 and 8")
    if group in (None, -1):
        return f"int{bits}"
    if type(group) is not int or group < 1:
        raise ValueError(f"quantization_config.group_size must be positive, or -1, got {short(group)}")
    return Format(f"int{bits}g{group}" + "z" * zeros, (bits + (16 + zeros * bits) / group) / 8, f"int{bits}")


def _packed(given):
    """AWQ and GPTQ store zero points also where they are all equal."""
    for key in ("dynamic", "modules_in_block_to_quantize", "lm_head"):
        if given.get(key):
            raise ValueError(f"quantization_config.{key} is not read")
    return _integers(given.get("bits", given.get("w_bit")), given.get("group_size", given.get("q_group_size")), True)


def _compressed(given):
    groups = given.get("config_groups")
    group = next(iter(groups.values())) if isinstance(groups, dict) and len(groups) == 1 else None
    weights = group.get("weights") if isinstance(group, dict) and group.get("targets") == ["Linear"] else None
    if not isinstance(weights, dict):
        raise ValueError("quantization_config.config_groups must hold one group of all Linear weights")
    kind, bits, block = weights.get("type"), weights.get("num_bits"), weights.get("block_structure")
    if kind == "float" and bits == 8 and weights.get("strategy") in ("tensor", "channel", "block"):
        return _fp8({"weight_block_size": block})
    if kind == "int" and weights.get("strategy") in ("tensor", "channel", "group"):
        return _integers(bits, weights.get("group_size"), weights.get("symmetric") is False)
    raise ValueError(f"quantization_config.config_groups: {short(bits)}-bit {short(kind)} weights are not read")


METHODS = {"fp8": _fp8, "mxfp4": None, "awq": _packed, "gptq": _packed, "compressed-tensors": _compressed}
