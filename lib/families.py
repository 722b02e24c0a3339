"""How the config.json of each family is read: what its attention and feed-forward networks are, layer by layer.

FAMILIES has a row a family: what is biased, normed or local in its attention, and the feed-forward networks it has.
What a file leaves out has the default of the family's code in `transformers`; whatever would change a count and is not
understood is refused with a ValueError that names the field."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from reprlib import repr as short

from .mixers import GQA, MLA
from .models import FFN, Block
from .variants import Chunked, Indexed, Windowed

LAYER_LIMIT, LIMIT = 10_000, 10**9  # of layers, of anything else that is counted
LOCAL = {"full_attention": False, "sliding_attention": True, "chunked_attention": True}  # entries of layer_types


def count(config, key, default=None, least=1, most=LIMIT):
    """A whole number; `default` where the field is absent or null."""
    value = default if config.get(key) is None else config[key]
    if value is None:
        raise ValueError(f"{key} is missing: a {config['model_type']} needs it")
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{key} must be a whole number from {least} to {most}, got {short(value)}")
    return value


def flag(config, key):
    """A field that is true or false; false where it is missing."""
    value = config.get(key)
    if not isinstance(value, bool | None):
        raise ValueError(f"{key} must be true or false, got {short(value)}")
    return bool(value)


def _layers(config):
    return range(count(config, "num_hidden_layers", most=LAYER_LIMIT))


def _per_layer(config, key, meaning):
    """What a list with one entry a layer means; None where it is absent."""
    values, layers = config.get(key), len(_layers(config))
    if values is None:
        return None
    if not isinstance(values, list) or len(values) != layers:
        raise ValueError(f"{key} must be a list of {layers} entries, one a layer (num_hidden_layers)")
    for value in values:
        if type(value) not in (str, int) or value not in meaning:
            raise ValueError(f"{key} has the unknown entry {short(value)}; known: {', '.join(map(str, meaning))}")
    return [meaning[value] for value in values]


def _indices(config, key, default):
    """The layers that a list names."""
    values, layers = default if config.get(key) is None else config[key], _layers(config)
    if not isinstance(values, list | range) or not all(type(i) is int and i in layers for i in values):
        raise ValueError(f"{key} must list layers from 0 to {len(layers) - 1}, got {short(values)}")
    return set(values)


def read_blocks(config):
    """Runs of equal layers, in order of appearance, named by what tells them apart. The config has its defaults."""
    family = FAMILIES[config["model_type"]]
    for key, value in {"use_bidirectional_attention": False, **family.only}.items():
        if config.get(key) is not None and config[key] != value:
            raise ValueError(f"{key} of a {config['model_type']} can only be {value!r}, got {short(config[key])}")
    mixers, ffns = _mixers(config, family), family.ffns(config)
    reach, kind, blocks = len(set(mixers)) > 1, len(set(ffns)) > 1, []
    for (mixer, ffn), layers in Counter(zip(mixers, ffns, strict=True)).items():
        near = "local" if isinstance(mixer, Windowed | Chunked) else "global"
        traits = [near] * reach + ["moe" if ffn.router else "dense"] * kind
        blocks.append(Block("-".join(traits) or "layers", layers, mixer, ffn, family.norms))
    return tuple(blocks)


def _mixers(config, family):
    """The mixer of each layer, within the family's window where layer_types, or else the family's rule, says so."""
    mixer = family.mixer(config, family)
    local = _per_layer(config, "layer_types", LOCAL)
    if local is None:
        local = family.local(config) if family.local else [False for _ in _layers(config)]
    if any(local) and (family.local is None or config.get("use_sliding_window") is False):
        raise ValueError(f"layer_types: this {config['model_type']} has no local layers")
    limit = Chunked if family.window == "attention_chunk_size" else Windowed
    near = limit(mixer, count(config, family.window)) if any(local) else None
    return [near if windowed else mixer for windowed in local]


def _gqa(config, family):
    D, N = count(config, "hidden_size"), count(config, "num_attention_heads")
    K = count(config, "num_key_value_heads", N if "num_key_value_heads" in config else None)
    if N % K:
        raise ValueError(f"num_key_value_heads {K} must divide num_attention_heads {N}")
    if config.get("head_dim") is None and D % N:
        raise ValueError(f"head_dim is missing, and num_attention_heads {N} does not divide hidden_size {D}")
    H = count(config, "head_dim", D // N)
    bias = {"q": N * H, "k": K * H, "v": K * H, "o": D} if flag(config, "attention_bias") else {}
    norm = {"": 0, "head": 2 * H, "heads": N * H + K * H}[family.normed if flag(config, "use_qk_norm") else ""]
    return GQA(N, K, H, extra=sum(bias.get(matrix, 0) for matrix in family.biased) + norm + family.sinks * N)


def _mla(config, family):
    q_rank = None if config.get("q_lora_rank") is None else count(config, "q_lora_rank")
    kv_rank, d_rope, norms = count(config, "kv_lora_rank"), count(config, "qk_rope_head_dim"), q_rank or 0
    bias = norms + kv_rank + d_rope + count(config, "hidden_size") if flag(config, "attention_bias") else 0
    widths = count(config, "qk_nope_head_dim"), count(config, "v_head_dim")
    return MLA(count(config, "num_attention_heads"), q_rank, kv_rank, d_rope, *widths, norms + kv_rank + bias)


def _indexed(config, family):
    heads, width, best = (count(config, f"index_{key}") for key in ("n_heads", "head_dim", "topk"))
    return Indexed(_mla(config, family), heads, width, best, extra=2 * width)


def _dense(config, width="intermediate_size"):
    F = count(config, width)
    return FFN(F, extra=2 * F + count(config, "hidden_size") if flag(config, "mlp_bias") else 0)


def _moe(config, experts, width, shared=0, bias=False, expert_extra=0):
    """Experts behind a router with or without a bias, beside `shared` experts of the same width."""
    if flag(config, "mlp_bias"):
        raise ValueError("mlp_bias: biases of experts are not modelled")
    E, F = count(config, experts), count(config, width)
    k = count(config, "num_experts_per_tok", most=E)
    return FFN(F, E, k, shared * F, router=1, extra=bias * E, expert_extra=expert_extra)


def _either(layers, sparse, moe, dense):
    """Experts in the layers `sparse`, one dense network in the others; what no layer has is not read."""
    kinds = [i in sparse for i in layers]
    made = {kind: make() for kind, make in ((True, moe), (False, dense)) if kind in kinds}
    return [made[kind] for kind in kinds]


def _all_dense(config):
    return [_dense(config)] * len(_layers(config))


def _all_moe(config):
    _per_layer(config, "attn_type_list", {1: "softmax"})  # MiniMax: anything else is linear attention
    bias, extra = flag(config, "use_routing_bias"), 0
    if config["model_type"] == "gpt_oss":  # whose experts have biases
        extra = 2 * count(config, "intermediate_size") + count(config, "hidden_size")
    return [_moe(config, "num_local_experts", "intermediate_size", 0, bias, extra)] * len(_layers(config))


def _qwen3_moe(config):
    layers, step = _layers(config), count(config, "decoder_sparse_step", 1)
    dense = _indices(config, "mlp_only_layers", [])
    sparse = {i for i in layers if i not in dense and (i + 1) % step == 0}
    return _either(layers, sparse, lambda: _moe(config, "num_experts", "moe_intermediate_size"), lambda: _dense(config))


def _llama4(config):
    layers, step = _layers(config), count(config, "interleave_moe_layer_step", 1)
    sparse = _indices(config, "moe_layers", range(step - 1, len(layers), step))
    moe = lambda: _moe(config, "num_local_experts", "intermediate_size", 1)  # noqa: E731
    return _either(layers, sparse, moe, lambda: _dense(config, "intermediate_size_mlp"))


def _after_dense(config):
    """Experts in every moe_layer_freq-th layer from first_k_dense_replace on."""
    layers, every = _layers(config), count(config, "moe_layer_freq", 1)
    first, shared = count(config, "first_k_dense_replace", least=0), count(config, "n_shared_experts", 0, least=0)
    routed, bias = config.get("n_routed_experts") is not None, config.get("topk_method") == "noaux_tc"
    sparse = {i for i in layers if routed and i >= first and i % every == 0}
    moe = lambda: _moe(config, "n_routed_experts", "moe_intermediate_size", shared, bias)  # noqa: E731
    return _either(layers, sparse, moe, lambda: _dense(config))


def _given_window(config):
    return [config.get("sliding_window") is not None for _ in _layers(config)]


def _last_layers(config):
    first = count(config, "max_window_layers", least=0) if flag(config, "use_sliding_window") else LAYER_LIMIT
    return [i >= first for i in _layers(config)]


def _all_but_every(config):
    every = count(config, "sliding_window_pattern")
    return [(i + 1) % every != 0 for i in _layers(config)]


def _with_rope(config):
    if config.get("no_rope_layers"):
        return _per_layer(config, "no_rope_layers", {0: False, 1: True})
    return _all_but_every({**config, "sliding_window_pattern": count(config, "no_rope_layer_interval", 4)})


@dataclass(frozen=True)
class Family:
    """What tells a family from Llama. `biased` matrices have a bias where attention_bias says so; queries and keys are
    normed, one "head" at a time or all "heads" at once, where use_qk_norm says so; `local` says which layers attend to
    no more than `window` tokens. `defaults` are those of its code; of the fields in `only`, one value is modelled."""

    ffns: Callable = _all_dense
    mixer: Callable = _gqa
    biased: str = "qkvo"
    normed: str = ""
    sinks: bool = False
    local: Callable | None = None
    window: str = "sliding_window"
    norms: int = 2
    defaults: dict = field(default_factory=dict)
    only: dict = field(default_factory=dict)


GEMMA = {"tie_word_embeddings": True, "head_dim": 256, "sliding_window": 4096, "sliding_window_pattern": 2}
GEMMA3 = {"vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 131072}
GEMMA3 = {**GEMMA, **GEMMA3, "sliding_window_pattern": 6, "use_qk_norm": True}
GEMMA3 = Family(normed="head", local=_all_but_every, norms=4, defaults=GEMMA3, only={"_sliding_window_pattern": 6})
LLAMA4 = Family(_llama4, local=_with_rope, window="attention_chunk_size", defaults={"attention_chunk_size": 8192})
DEEPSEEK = Family(_after_dense, _mla, defaults={"topk_method": "noaux_tc"})
QWEN2 = {"attention_bias": True, "use_sliding_window": False}
QWEN3 = {"use_qk_norm": True, "use_sliding_window": False}
GPT_OSS = {"attention_bias": True, "use_routing_bias": True, "head_dim": 64}
GPT_OSS = {**GPT_OSS, "sliding_window": 128, "sliding_window_pattern": 2}
MINIMAX = {"use_qk_norm": True, "use_routing_bias": True, "head_dim": 128}
MINIMAX_ONLY = {"attention_bias": False, "qk_norm_type": "per_layer", "shared_intermediate_size": 0}
UNBIASED = {"attention_bias": False}
FAMILIES = {
    "llama": Family(defaults={"num_key_value_heads": None}),
    "mistral": Family(local=_given_window, defaults={"sliding_window": 4096}, only=UNBIASED),
    "mixtral": Family(_all_moe, local=_given_window, only=UNBIASED),
    "qwen2": Family(biased="qkv", local=_last_layers, defaults=QWEN2, only={"attention_bias": True}),
    "qwen3": Family(normed="head", local=_last_layers, defaults={**QWEN3, "head_dim": 128}),
    "qwen3_moe": Family(_qwen3_moe, normed="head", defaults=QWEN3, only={"use_sliding_window": False}),
    "gemma2": Family(local=_all_but_every, norms=4, defaults=GEMMA),
    "gemma3": GEMMA3,
    "gemma3_text": GEMMA3,
    "llama4": LLAMA4,
    "llama4_text": LLAMA4,
    "gpt_oss": Family(_all_moe, sinks=True, local=_all_but_every, defaults=GPT_OSS),
    "glm4_moe": Family(_after_dense, biased="qkv", normed="head", defaults={"topk_method": "noaux_tc"}),
    "deepseek_v2": Family(_after_dense, _mla),
    "deepseek_v3": DEEPSEEK,
    "deepseek_v32": Family(_after_dense, _indexed, defaults=DEEPSEEK.defaults),
    "kimi_k2": DEEPSEEK,
    "minimax_m2": Family(_all_moe, normed="heads", defaults=MINIMAX, only=MINIMAX_ONLY),
}
