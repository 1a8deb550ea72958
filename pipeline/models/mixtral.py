"""Mixtral: grouped-query attention without biases, E experts a layer, softmax over the chosen k."""

from __future__ import annotations

from pipeline.models.spec import (
    Architecture,
    BackboneNames,
    Config,
    LayerNames,
    ModelSpec,
    expect,
    optional,
    required,
    rope_theta,
)


class Mixtral(Architecture):
    model_type = "mixtral"

    def spec(self, config: Config) -> ModelSpec:
        expect(config, "hidden_act", ("silu",))
        expect(config, "attention_bias", (False, None))
        heads = required(config, "num_attention_heads", int)
        hidden = required(config, "hidden_size", int)
        return ModelSpec(
            layers=required(config, "num_hidden_layers", int),
            hidden=hidden,
            intermediate=required(config, "intermediate_size", int),
            experts=required(config, "num_local_experts", int),
            top_k=required(config, "num_experts_per_tok", int),
            heads=heads,
            kv_heads=required(config, "num_key_value_heads", int),
            head_dim=optional(config, "head_dim", int) or hidden // heads,
            vocabulary=required(config, "vocab_size", int),
            max_positions=required(config, "max_position_embeddings", int),
            norm_eps=float(required(config, "rms_norm_eps", float)),
            rope_theta=rope_theta(config, 1e6),
            sliding_window=optional(config, "sliding_window", int),
            tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        )

    def backbone_names(self, spec: ModelSpec) -> BackboneNames:
        head = None if spec.tied_embeddings else "lm_head.weight"
        return BackboneNames("model.embed_tokens.weight", "model.norm.weight", head)

    def layer_names(self, layer: int) -> LayerNames:
        at = f"model.layers.{layer}"
        return LayerNames(
            attention_norm=f"{at}.input_layernorm.weight",
            query=f"{at}.self_attn.q_proj.weight",
            key=f"{at}.self_attn.k_proj.weight",
            value=f"{at}.self_attn.v_proj.weight",
            output=f"{at}.self_attn.o_proj.weight",
            moe_norm=f"{at}.post_attention_layernorm.weight",
            router=f"{at}.block_sparse_moe.gate.weight",
        )

    def expert_names(self, layer: int, expert: int) -> tuple[str, str, str]:
        at = f"model.layers.{layer}.block_sparse_moe.experts.{expert}"
        return f"{at}.w1.weight", f"{at}.w3.weight", f"{at}.w2.weight"
