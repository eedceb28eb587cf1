"""The same decoder in plain torch, to compare with: one sequence at a time, no pages, no shared code."""

from __future__ import annotations

import torch
from torch import Tensor

from tskernel.demo.weights import Config, Weights


class PlainDecoder:
    """One request: its keys and values so far, by layer."""

    def __init__(self, config: Config, weights: Weights) -> None:
        self.config, self.weights = config, weights
        self.keys: list[list[Tensor]] = [[] for _ in range(config.layers)]
        self.values: list[list[Tensor]] = [[] for _ in range(config.layers)]
        self.length = 0

    def __call__(self, tokens: Tensor) -> int:
        """Run new tokens and return the best next one."""
        c, w = self.config, self.weights
        h = w["embed"][tokens]
        for i in range(c.layers):
            layer = {k.split(".")[2]: v for k, v in w.items() if k.startswith(f"layers.{i}.")}
            h = h + self.attention(i, layer, norm(h, layer["attn_norm"], c.eps))
            h = h + self.mlp(layer, norm(h, layer["mlp_norm"], c.eps))
        self.length += len(tokens)
        return int((norm(h[-1], w["norm"], c.eps) @ w["lm_head"].T).argmax())

    def attention(self, index: int, layer: Weights, x: Tensor) -> Tensor:
        """Attend head by head to everything seen, or to the last ``window`` tokens."""
        c = self.config
        rows = (x @ layer["qkv"].T + layer["qkv_bias"]).view(len(x), -1, c.head_dim).transpose(0, 1)
        place = torch.arange(self.length, self.length + len(x))
        q, k, v = rows.split((c.q_heads, c.kv_heads, c.kv_heads))
        self.keys[index].append(rotate(k, place, c.rope_base))
        self.values[index].append(v)
        q, keys, values = (
            rotate(q, place, c.rope_base),
            torch.cat(self.keys[index], 1),
            torch.cat(self.values[index], 1),
        )
        back = place[:, None] - torch.arange(keys.shape[1])
        hidden = back < 0
        if c.window_of(index):
            hidden = hidden | (back >= c.window_of(index))
        outputs = []
        for head in range(c.q_heads):
            group = head // (c.q_heads // c.kv_heads)
            scores = (q[head] @ keys[group].T) / c.head_dim**0.5
            scores = scores.masked_fill(hidden, float("-inf"))
            sink = layer["sinks"][head].expand(len(x), 1)
            probabilities = torch.cat((scores, sink), 1).softmax(1)[:, :-1]
            outputs.append(probabilities @ values[group])
        return torch.cat(outputs, 1) @ layer["o"].T + layer["o_bias"]

    def mlp(self, layer: Weights, x: Tensor) -> Tensor:
        """Run each expert on the tokens that chose it."""
        best, chosen = (x @ layer["router"].T + layer["router_bias"]).topk(self.config.top_k)
        weight = best.softmax(1)
        out = torch.zeros_like(x)
        for expert in range(self.config.experts):
            token, place = torch.where(chosen == expert)
            gate, up = (x[token] @ layer["w13"][expert].T + layer["w13_bias"][expert]).chunk(2, 1)
            gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
            hidden = gate * torch.sigmoid(1.702 * gate) * (up + 1)
            out[token] += weight[token, place, None] * (hidden @ layer["w2"][expert].T + layer["w2_bias"][expert])
        return out


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Scale rows to unit root-mean-square."""
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def rotate(x: Tensor, place: Tensor, base: float) -> Tensor:
    """Rotate channel i and i + width/2 as one complex number."""
    half = x.shape[-1] // 2
    angle = place[:, None] * base ** (-torch.arange(half) / half)
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat((turned.real, turned.imag), -1)
