"""config.json in, Model out: real files, fields that families differ in, and whatever else may lie in a folder."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from lib.configs import FILE_LIMIT, from_config
from lib.formats import Format, Precision
from lib.mixers import GQA, MLA
from lib.models import FFN, kv_bytes, model
from lib.variants import Chunked, Windowed

CONFIGS = Path(__file__).parent / "configs"
FILES = {
    "MiniMaxAI--MiniMax-M2.5": "minimax-m2.5",
    "Qwen--Qwen3-235B-A22B": "qwen3-235b-a22b",
    "Qwen--Qwen3-30B-A3B": "qwen3-30b-a3b",
    "Qwen--Qwen3-32B": "qwen3-32b",
    "deepseek-ai--DeepSeek-R1": "deepseek-r1",
    "deepseek-ai--DeepSeek-V3.2": "deepseek-v3.2",
    "deepseek-ai--DeepSeek-V3": "deepseek-v3",
    "meta-llama--Llama-4-Maverick-17B-128E-Instruct": "llama-4-maverick",
    "meta-llama--Llama-4-Scout-17B-16E-Instruct": "llama-4-scout",
    "meta-llama--Meta-Llama-3.1-405B": "llama-3.1-405b",
    "meta-llama--Meta-Llama-3.1-70B": "llama-3.1-70b",
    "meta-llama--Meta-Llama-3.1-8B": "llama-3.1-8b",
    "mistralai--Mixtral-8x22B-v0.1": "mixtral-8x22b",
    "mistralai--Mixtral-8x7B-v0.1": "mixtral-8x7b",
    "openai--gpt-oss-120b": "gpt-oss-120b",
    "openai--gpt-oss-20b": "gpt-oss-20b",
}


def real(name):
    """Contents of a real config.json."""
    return json.loads((CONFIGS / f"{name}_config.json").read_text(encoding="utf-8"))


def shape(kind, layers, width, heads, kv_heads, d_ff, vocab, **more):
    """Contents of a config.json, with the fields that most families have."""
    return {
        "model_type": kind,
        "num_hidden_layers": layers,
        "hidden_size": width,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": d_ff,
        "vocab_size": vocab,
        **more,
    }


def small(kind="llama", **more):
    """A small model of a family; a field set to ... is left out."""
    fields = shape(kind, 4, 64, 4, 2, 128, 100, **more)
    return {field: value for field, value in fields.items() if value is not ...}


MLA_FIELDS = {
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}

# Files of models that are not among the copies, by the fields that their shape depends on.
WRITTEN = {
    "llama-2-13b": shape("llama", 40, 5120, 40, 40, 13824, 32000, max_position_embeddings=4096, torch_dtype="float16"),
    "mistral-7b-v0.1": shape(
        "mistral", 32, 4096, 32, 8, 14336, 32000, sliding_window=4096, max_position_embeddings=32768
    ),
    "qwen2.5-72b": shape(
        "qwen2",
        80,
        8192,
        64,
        8,
        29568,
        152064,
        max_position_embeddings=131072,
        max_window_layers=80,
        sliding_window=131072,
        use_sliding_window=False,
    ),
    "gemma-2-27b": shape(
        "gemma2", 46, 4608, 32, 16, 36864, 256000, head_dim=128, sliding_window=4096, max_position_embeddings=8192
    ),
    # The file on the hub leaves out what its class defaults to, the vocabulary and the layer pattern among it.
    "gemma-3-27b": {
        "model_type": "gemma3",
        "torch_dtype": "bfloat16",
        "vision_config": {"model_type": "siglip_vision_model", "hidden_size": 1152},
        "text_config": {
            "model_type": "gemma3_text",
            "num_hidden_layers": 62,
            "hidden_size": 5376,
            "num_attention_heads": 32,
            "num_key_value_heads": 16,
            "head_dim": 128,
            "intermediate_size": 21504,
            "sliding_window": 1024,
        },
    },
    "glm-4.6": shape(
        "glm4_moe",
        92,
        5120,
        96,
        8,
        12288,
        151552,
        head_dim=128,
        attention_bias=True,
        use_qk_norm=True,
        first_k_dense_replace=3,
        n_routed_experts=160,
        n_shared_experts=1,
        num_experts_per_tok=8,
        moe_intermediate_size=1536,
        max_position_embeddings=202752,
        num_nextn_predict_layers=1,
    ),
    "deepseek-v2": shape(
        "deepseek_v2",
        60,
        5120,
        128,
        128,
        12288,
        102400,
        **MLA_FIELDS,
        first_k_dense_replace=1,
        moe_layer_freq=1,
        n_routed_experts=160,
        n_shared_experts=2,
        num_experts_per_tok=6,
        moe_intermediate_size=1536,
        topk_method="group_limited_greedy",
    ),
}
KIMI = shape(
    "kimi_k2",
    61,
    7168,
    64,
    64,
    18432,
    163840,
    **MLA_FIELDS,
    first_k_dense_replace=1,
    n_routed_experts=384,
    n_shared_experts=1,
    num_experts_per_tok=8,
    moe_intermediate_size=2048,
)


@pytest.mark.parametrize("file", FILES)
def test_real_files_describe_the_models_of_the_data_file(file):
    """Blocks, tables, context and native precision are those of models.toml."""
    name = FILES[file]
    assert from_config(CONFIGS / f"{file}_config.json", name) == model(name)


@pytest.mark.parametrize("name", WRITTEN)
def test_written_files_describe_the_models_of_the_data_file(name):
    """The families of which there is no copy, defaults of their classes included."""
    assert from_config(WRITTEN[name], name) == model(name)


def test_hybrid_is_refused():
    """A family without a reader is named, with those that have one."""
    with pytest.raises(ValueError, match="model_type 'qwen3_5_moe_text' has no reader; families: llama, mistral"):
        from_config(CONFIGS / "Qwen--Qwen3.5-397B-A17B_config.json")


def test_every_copy_is_tested():
    """A config that is added to the folder needs an expectation."""
    assert {f"{file}_config.json" for file in [*FILES, "Qwen--Qwen3.5-397B-A17B"]} == {
        p.name for p in CONFIGS.iterdir()
    }


def test_kimi_k2():
    """1.026e12 parameters: attention, experts and a shared one, router and bias, a dense layer, norms, two tables."""
    attention = 7168 * (1536 + 576) + 1536 * 64 * 192 + 512 * 64 * 256 + 64 * 128 * 7168 + 2048
    moe = 385 * 3 * 7168 * 2048 + 384 * 7168 + 384
    expected = 61 * attention + 60 * moe + 3 * 7168 * 18432 + (2 * 61 + 1) * 7168 + 2 * 163840 * 7168
    assert from_config(KIMI).params == expected == 1_026_408_232_448


def test_a_path_a_folder_and_a_dict_are_the_same(tmp_path):
    """The name is given, or that of the file or the family."""
    (tmp_path / "config.json").write_text(json.dumps(small()), encoding="utf-8")
    by_path, by_text = from_config(tmp_path / "config.json"), from_config(str(tmp_path / "config.json"))
    by_folder, by_dict = from_config(tmp_path, "mine"), from_config(small())
    assert by_path == by_text == replace(by_folder, name=by_path.name) == replace(by_dict, name=by_path.name)
    assert (by_folder.name, by_dict.name) == ("mine", "llama")


def test_the_contents_are_not_changed():
    """A dict stays as it was given."""
    fields = real("meta-llama--Llama-4-Scout-17B-16E-Instruct")
    from_config(fields)
    assert fields == real("meta-llama--Llama-4-Scout-17B-16E-Instruct")


def only_block(fields):
    (block,) = from_config(fields).blocks
    return block


def layers_by_reach(fields):
    """Layers with a window, and without."""
    blocks = from_config(fields).blocks
    local = sum(block.layers for block in blocks if isinstance(block.mixer, Windowed | Chunked))
    return local, sum(block.layers for block in blocks) - local


def test_head_dim_defaults_to_the_share_of_a_head():
    """64 values over 4 heads are 16 each, whether the field is absent or null."""
    assert only_block(small()).mixer == only_block(small(head_dim=None)).mixer == GQA(4, 2, 16)


def test_kv_heads_default_to_heads():
    """Files from before grouped-query attention have no num_key_value_heads."""
    assert only_block(small(num_key_value_heads=...)).mixer == GQA(4, 4, 16)


@pytest.mark.parametrize(
    "fields, extra",
    [
        (small(attention_bias=True), 64 + 2 * 32 + 64),
        (small("qwen2"), 64 + 2 * 32),
        (small("qwen3", head_dim=16), 2 * 16),
        (small("qwen3", head_dim=16, attention_bias=True), 64 + 2 * 32 + 64 + 2 * 16),
        (small("glm4_moe", first_k_dense_replace=4, attention_bias=True), 64 + 2 * 32),
        (small("glm4_moe", first_k_dense_replace=4, use_qk_norm=True), 2 * 16),
    ],
)
def test_biases_and_norms_of_attention(fields, extra):
    """Qwen 2 always has query, key and value biases; GLM has no output bias; Qwen 3 norms queries and keys by head."""
    assert only_block(fields).mixer.extra == extra


def test_biases_of_the_dense_network():
    """Gate and up biases are d_ff wide, the down bias as wide as the model."""
    assert only_block(small(mlp_bias=True)).ffn == FFN(128, extra=2 * 128 + 64)


@pytest.mark.parametrize(
    "kind, more, tied",
    [
        ("llama", {}, False),
        ("gemma2", {}, True),
        ("gemma3_text", {}, True),
        ("llama", {"tie_word_embeddings": True}, True),
        ("gemma2", {"tie_word_embeddings": False}, False),
    ],
)
def test_tied_tables(kind, more, tied):
    """Gemma ties its tables unless the file says otherwise, the others do not."""
    assert from_config(small(kind, **more)).tied is tied


def test_tied_tables_may_be_said_around_text_config():
    """A multimodal file says it for the whole model."""
    nested = {"model_type": "gemma3", "tie_word_embeddings": False, "text_config": small("gemma3_text")}
    assert from_config(nested).tied is False


@pytest.mark.parametrize(
    "fields, local",
    [
        (small("mistral"), 4),
        (small("mistral", sliding_window=None), 0),
        (small("mixtral", num_local_experts=4, num_experts_per_tok=2), 0),
        (small("mixtral", num_local_experts=4, num_experts_per_tok=2, sliding_window=32), 4),
        (small("qwen2", sliding_window=32, max_window_layers=1), 0),
        (small("qwen2", sliding_window=32, max_window_layers=1, use_sliding_window=True), 3),
        (small("qwen3", sliding_window=32, max_window_layers=4, use_sliding_window=True), 0),
        (small("gemma2"), 2),
        (small("gemma3_text"), 4),
        (small("gemma3_text", sliding_window_pattern=2), 2),
        (small("gemma3_text", layer_types=["full_attention"] + 3 * ["sliding_attention"]), 3),
        (small("gpt_oss", num_local_experts=4, num_experts_per_tok=2), 2),
    ],
)
def test_which_layers_have_a_window(fields, local):
    """Mistral all or none, Qwen the layers from max_window_layers on, Gemma and gpt-oss by pattern or layer_types."""
    assert layers_by_reach(fields) == (local, 4 - local)


def llama4(**more):
    """A small Llama 4 as it is nested on the hub."""
    fields = {"intermediate_size_mlp": 256, "num_local_experts": 8, "num_experts_per_tok": 1}
    return {"model_type": "llama4", "text_config": small("llama4_text", **{**fields, **more})}


@pytest.mark.parametrize(
    "fields, local",
    [
        (llama4(), 3),
        (llama4(no_rope_layers=[]), 3),
        (llama4(no_rope_layer_interval=2), 2),
        (llama4(no_rope_layers=[1, 0, 0, 0]), 1),
        (llama4(layer_types=2 * ["chunked_attention", "full_attention"]), 2),
    ],
)
def test_llama_4_chunks_the_layers_with_positions(fields, local):
    """By default every fourth layer has no positions and attends to everything."""
    assert layers_by_reach(fields) == (local, 4 - local)


def test_llama_4_keeps_no_more_than_a_chunk():
    """Three of four layers keep the last attention_chunk_size tokens."""
    chunked = from_config(llama4(attention_chunk_size=32))
    assert kv_bytes(chunked, 1000) == 2 * 2 * 2 * 16 * (1000 + 3 * 32)


def moe_layers(fields):
    return sum(block.layers for block in from_config(fields).blocks if block.ffn.router)


QWEN_MOE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
DEEPSEEK_MOE = {**MLA_FIELDS, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


@pytest.mark.parametrize(
    "fields, sparse",
    [
        (llama4(), 4),
        (llama4(interleave_moe_layer_step=2), 2),
        (llama4(moe_layers=[3]), 1),
        (small("qwen3_moe", **QWEN_MOE), 4),
        (small("qwen3_moe", **QWEN_MOE, decoder_sparse_step=2), 2),
        (small("qwen3_moe", **QWEN_MOE, mlp_only_layers=[0, 3]), 2),
        (small("deepseek_v2", **DEEPSEEK_MOE, first_k_dense_replace=1), 3),
        (small("deepseek_v2", **DEEPSEEK_MOE, first_k_dense_replace=1, moe_layer_freq=2), 1),
        (small("deepseek_v3", **DEEPSEEK_MOE, first_k_dense_replace=0), 4),
        (small("deepseek_v3", **{**DEEPSEEK_MOE, "n_routed_experts": None}, first_k_dense_replace=0), 0),
    ],
)
def test_which_layers_have_experts(fields, sparse):
    """By step, by list, or from a first layer on."""
    assert moe_layers(fields) == sparse


def test_router_bias_follows_the_routing_method():
    """DeepSeek-V3 balances by a bias an expert, DeepSeek-V2 has none."""
    old, new = (
        only_block(small(kind, **DEEPSEEK_MOE, first_k_dense_replace=0)) for kind in ("deepseek_v2", "deepseek_v3")
    )
    assert (old.ffn.extra, new.ffn.extra) == (0, 8)


def test_mla_without_a_query_latent():
    """DeepSeek-V2-Lite projects queries directly: one norm instead of two."""
    fields = small("deepseek_v2", **{**DEEPSEEK_MOE, "q_lora_rank": None}, first_k_dense_replace=0)
    assert only_block(fields).mixer == MLA(4, None, 512, 64, 128, 128, extra=512)


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}
PACKED = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
FP8 = {"num_bits": 8, "type": "float", "strategy": "channel"}


def compressed(weights, ignore=("lm_head",)):
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "config_groups": groups, "ignore": list(ignore)}


@pytest.mark.parametrize(
    "given, weights, head",
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8b128", "bf16"),
        ({"quant_method": "fp8"}, "fp8", "bf16"),
        (AWQ, Format("int4g128z", (4 + 20 / 128) / 8, "int4"), "bf16"),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1}, "int8", "bf16"),
        (compressed(PACKED), "int4g32", "bf16"),
        (compressed(FP8), "fp8", "bf16"),
        (compressed(FP8, ignore=[]), "fp8", "fp8"),
    ],
)
def test_quantized_matrices(given, weights, head):
    """The matrices of the layers take scales and zero points with them; the embedding stays, the head may not."""
    native = from_config(small(quantization_config=given)).native
    assert native == Precision(weights, embedding="bf16", head=head)


def test_attention_left_as_it_is():
    """A quantizer may leave the attention of all layers alone."""
    given = {"quant_method": "fp8", "modules_to_not_convert": ["lm_head", "model.layers.*.self_attn"]}
    assert from_config(small(quantization_config=given)).native == Precision(
        "fp8", attention="bf16", embedding="bf16", head="bf16"
    )


@pytest.mark.parametrize("field", ["dtype", "torch_dtype"])
def test_dtype(field):
    """The dtype under its old and its new name."""
    assert from_config(small(**{field: "float16"})).native == Precision("f16")


def nested(depth):
    return "[" * depth + "]" * depth


FILES_THAT_ARE_NONE = {
    "truncated": (json.dumps(small())[:-20], "not valid JSON"),
    "empty": ("", "not valid JSON"),
    "binary": (b"\x80\xff\x00\x93", "not valid JSON"),
    "list": ("[1, 2]", "must hold a JSON object"),
    "number": ("7", "must hold a JSON object"),
    "nested": (nested(200_000), "nested too deeply"),
    "nested in a field": ('{"model_type": ' + nested(200_000) + "}", "nested too deeply"),
    "10 MB of nesting": (nested(5_000_000), "larger than"),
    "too large": (json.dumps(small(comment="x" * FILE_LIMIT)), "larger than"),
    "endless number": ('{"hidden_size": ' + "9" * 10_000 + "}", "not valid JSON"),
}


@pytest.mark.parametrize("case", FILES_THAT_ARE_NONE)
def test_what_is_no_config(tmp_path, case):
    """ValueError that names the file and what is wrong with it."""
    text, message = FILES_THAT_ARE_NONE[case]
    path = tmp_path / "config.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=f"config.json.*{message}"):
        from_config(path)


def test_no_such_file(tmp_path):
    """ValueError that names the path, for a file and for a folder without one."""
    with pytest.raises(ValueError, match="absent.json cannot be read: No such file"):
        from_config(tmp_path / "absent.json")
    with pytest.raises(ValueError, match="config.json cannot be read: No such file"):
        from_config(tmp_path)


@pytest.mark.parametrize("what", [None, 7, [small()], b"config.json"])
def test_neither_path_nor_dict(what):
    """ValueError, whatever else is passed."""
    with pytest.raises(ValueError, match="a config is a dict or the path of a config.json"):
        from_config(what)


REFUSED = {
    "no model_type": (small(model_type=...), "model_type None has no reader"),
    "model_type of another kind": (small(model_type=["llama"]), "model_type .* has no reader"),
    "empty": ({}, "model_type None has no reader"),
    "encoder only": (small("bert"), "model_type 'bert' has no reader; families: llama"),
    "state space": (small("mamba2"), "model_type 'mamba2' has no reader"),
    "encoder and decoder": (small(is_encoder_decoder=True), "is_encoder_decoder: 'llama' has an encoder"),
    "embedding model": (small("gemma3_text", use_bidirectional_attention=True), "use_bidirectional_attention"),
    "text_config": (small(text_config=[]), "text_config must be an object"),
    "no width": (small(hidden_size=...), "hidden_size is missing: a llama needs it"),
    "no vocabulary": (small(vocab_size=...), "vocab_size is missing"),
    "no heads": (small(num_attention_heads=None), "num_attention_heads is missing"),
    "no kv heads": (small("mistral", num_key_value_heads=...), "num_key_value_heads is missing"),
    "no d_ff": (small(intermediate_size=...), "intermediate_size is missing"),
    "no layers": (small(num_hidden_layers=0), "num_hidden_layers must be a whole number from 1 to 10000, got 0"),
    "too many layers": (small(num_hidden_layers=10**9), "num_hidden_layers must be"),
    "negative width": (small(hidden_size=-64), "hidden_size must be a whole number from 1 .*, got -64"),
    "fractional width": (small(hidden_size=64.5), "hidden_size must be a whole number"),
    "width as text": (small(hidden_size="64"), "hidden_size must be a whole number .*, got '64'"),
    "width as bool": (small(hidden_size=True), "hidden_size must be a whole number"),
    "width not finite": (small(intermediate_size=float("nan")), "intermediate_size must be a whole number"),
    "width as list": (small(intermediate_size=[128] * 4), "intermediate_size must be a whole number"),
    "zero head_dim": (small(head_dim=0), "head_dim must be a whole number"),
    "uneven heads": (small(num_attention_heads=3, num_key_value_heads=1), "head_dim is missing"),
    "uneven kv heads": (small(num_key_value_heads=3), "num_key_value_heads 3 must divide num_attention_heads 4"),
    "more kv heads": (small(num_key_value_heads=8), "num_key_value_heads 8 must divide"),
    "flag": (small(attention_bias="yes"), "attention_bias must be true or false, got 'yes'"),
    "tied": (small(tie_word_embeddings=1), "tie_word_embeddings must be true or false"),
    "tied twice": (
        {
            "model_type": "gemma3",
            "tie_word_embeddings": True,
            "text_config": small("gemma3_text", tie_word_embeddings=False),
        },
        "tie_word_embeddings of text_config contradicts",
    ),
    "dtype": (small(torch_dtype="int3"), "torch_dtype 'int3' is not one of bfloat16"),
    "context": (small(max_position_embeddings=-1), "max_position_embeddings must be a whole number"),
    "unknown layer type": (
        small("gemma2", layer_types=["full_attention"] * 3 + ["linear_attention"]),
        "layer_types has the unknown entry 'linear_attention'; known: full_attention",
    ),
    "odd layer type": (small("gemma2", layer_types=[{}] * 4), "layer_types has the unknown entry {}"),
    "short layer_types": (small("gemma2", layer_types=["full_attention"]), "layer_types must be a list of 4 entries"),
    "layer_types as text": (small("gemma2", layer_types="full"), "layer_types must be a list of 4 entries"),
    "local layers in Llama": (small(layer_types=["sliding_attention"] * 4), "layer_types: this llama has no local"),
    "local layers without a window": (small("gemma2", sliding_window=None), "sliding_window is missing"),
    "zero window": (small("mistral", sliding_window=0), "sliding_window must be a whole number"),
    "Qwen window without a start": (
        small("qwen2", sliding_window=32, use_sliding_window=True),
        "max_window_layers is missing",
    ),
    "Qwen MoE window": (small("qwen3_moe", **QWEN_MOE, use_sliding_window=True), "use_sliding_window of a qwen3_moe"),
    "Qwen 2 without biases": (small("qwen2", attention_bias=False), "attention_bias of a qwen2 can only be True"),
    "no_rope_layers": (llama4(no_rope_layers=[1, 0]), "no_rope_layers must be a list of 4 entries"),
    "no_rope_layers entry": (llama4(no_rope_layers=[1, 0, 2, 1]), "no_rope_layers has the unknown entry 2"),
    "chunk": (llama4(attention_chunk_size=None), "attention_chunk_size is missing"),
    "zero step": (llama4(interleave_moe_layer_step=0), "interleave_moe_layer_step must be"),
    "moe_layers": (llama4(moe_layers=[4]), "moe_layers must list layers from 0 to 3"),
    "mlp_only_layers": (small("qwen3_moe", **QWEN_MOE, mlp_only_layers="0"), "mlp_only_layers must list layers"),
    "more experts a token": (
        small("mixtral", num_local_experts=4, num_experts_per_tok=5),
        "num_experts_per_tok must be a whole number from 1 to 4, got 5",
    ),
    "no experts": (small("mixtral", num_experts_per_tok=2), "num_local_experts is missing"),
    "no first dense layer": (small("deepseek_v3", **DEEPSEEK_MOE), "first_k_dense_replace is missing"),
    "no latent": (
        small("deepseek_v3", **{**DEEPSEEK_MOE, "kv_lora_rank": None}, first_k_dense_replace=0),
        "kv_lora_rank is missing",
    ),
    "moe_layer_freq": (
        small("deepseek_v3", **DEEPSEEK_MOE, first_k_dense_replace=0, moe_layer_freq=[0, 1, 1, 1]),
        "moe_layer_freq must be a whole number",
    ),
    "no indexer": (
        small("deepseek_v32", **DEEPSEEK_MOE, first_k_dense_replace=0),
        "index_n_heads is missing: a deepseek_v32 needs it",
    ),
    "linear attention": (
        {**real("MiniMaxAI--MiniMax-M2.5"), "attn_type_list": [0] * 62},
        "attn_type_list has the unknown entry 0",
    ),
    "norms of MiniMax": (
        {**real("MiniMaxAI--MiniMax-M2.5"), "qk_norm_type": "per_head"},
        "qk_norm_type of a minimax_m2",
    ),
    "shared expert of MiniMax": (
        {**real("MiniMaxAI--MiniMax-M2.5"), "shared_intermediate_size": 1536},
        "shared_intermediate_size of a minimax_m2 can only be 0",
    ),
    "biases of experts": (
        small("mixtral", num_local_experts=4, num_experts_per_tok=2, mlp_bias=True),
        "mlp_bias: biases of experts",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_at_the_door(case):
    """ValueError names the field and the rule it breaks."""
    fields, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        from_config(fields)


UNREAD = {
    "no object": ("int4", "quantization_config must be an object"),
    "no method": ({}, "quantization_config.quant_method None is not read; known: fp8"),
    "unknown method": ({"quant_method": "bitsandbytes"}, "quantization_config.quant_method 'bitsandbytes' is not read"),
    "method of gpt-oss": ({"quant_method": "mxfp4"}, "quantization_config.quant_method 'mxfp4' of a llama"),
    "block": ({"quant_method": "fp8", "weight_block_size": [1, 128]}, "quantization_config.weight_block_size"),
    "bits": ({**AWQ, "bits": 3}, "quantization_config: 3 bits are not read"),
    "group": ({**AWQ, "group_size": 0}, "quantization_config.group_size must be positive"),
    "modules": ({**AWQ, "modules_to_not_convert": "lm_head"}, "modules_to_not_convert must be a list"),
    "one layer": (
        {**AWQ, "modules_to_not_convert": ["model.layers.0.self_attn"]},
        "modules_to_not_convert: 'model.lay",
    ),
    "shared experts": (compressed(PACKED, ["lm_head", "re:.*shared_experts.*"]), "quantization_config.ignore: 're:.*"),
    "two groups": (
        {"quant_method": "compressed-tensors", "config_groups": {"a": {}, "b": {}}},
        "quantization_config.config_groups must hold one group",
    ),
    "fp4": (compressed({**FP8, "num_bits": 4}), "config_groups: 4-bit 'float' weights are not read"),
    "mixed bits": ({"quant_method": "gptq", "bits": 4, "group_size": 128, "dynamic": {"x": 1}}, "dynamic is not read"),
}


@pytest.mark.parametrize("case", UNREAD)
def test_formats_that_are_not_read(case):
    """ValueError names the field of quantization_config: a wrong size is worse than none."""
    given, message = UNREAD[case]
    with pytest.raises(ValueError, match=message):
        from_config(small(quantization_config=given))
