"""What an installation without extras can do: attention, its map, a watched model. `make light` runs it."""

import importlib.util

import torch

import regard

EXTRAS = ("tokenizers", "safetensors", "lightning_fabric", "tyro", "rich", "matplotlib", "sklearn", "transformers")


def main() -> None:
    present = [name for name in EXTRAS if importlib.util.find_spec(name)]
    assert not present, f"this is no installation without extras: it has {', '.join(present)}"
    assert "site-packages" in str(regard.__file__), f"the installed package was wanted, not {regard.__file__}"

    q, k, v = torch.randn(2, 8, 12, 16), torch.randn(2, 2, 20, 16), torch.randn(2, 2, 20, 16)
    output, weights = regard.attention(q, k, v, mask=regard.causal(), return_weights=True)
    torch.testing.assert_close(weights @ v, output)
    torch.testing.assert_close(weights.pooled(4, 5, "sum").sum((-2, -1)), torch.full((2, 8), 12.0))

    layer = torch.nn.TransformerEncoderLayer(16, 2, batch_first=True).eval()
    with regard.watch(layer) as seen, torch.no_grad():
        layer(torch.randn(1, 9, 16))
    assert seen["self_attn", 0].entropy().shape == (1, 2, 9)
    print(f"regard {regard.__version__} without extras: {weights}")


if __name__ == "__main__":
    main()
