"""What the benchmarks count, and that the README shows what they measured."""

from pathlib import Path

import pytest

import plot
from flops import attention_flops

README = Path(__file__).parent.parent / "README.md"


class TestAttentionFlops:
    def test_forward_is_4_btshn(self):
        count = attention_flops(batch=2, query_length=3, key_length=5, heads=7, head_dim=11)
        assert count == 4 * 2 * 3 * 5 * 7 * 11

    def test_backward_is_two_and_a_half_times_forward(self):
        sizes = {"batch": 1, "query_length": 4, "key_length": 4, "heads": 2, "head_dim": 8}
        assert attention_flops(**sizes, backward=True) == 3.5 * attention_flops(**sizes)

    @pytest.mark.parametrize(("query_length", "key_length"), [(6, 6), (5, 3), (3, 5), (1, 9)])
    def test_causal_counts_visible_pairs(self, query_length, key_length):
        pairs = sum(j <= i for i in range(query_length) for j in range(key_length))
        count = attention_flops(
            batch=1,
            query_length=query_length,
            key_length=key_length,
            heads=1,
            head_dim=1,
            is_causal=True,
        )
        assert count == 4 * pairs


def test_readme_shows_the_newest_results():
    text = README.read_text()
    assert plot.with_table(text, "cpu", plot.read(plot.newest_results("cpu"))) == text
