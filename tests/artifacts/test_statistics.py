"""Statistics add, mix, split into halves, and come back from disk as they were."""

import numpy as np
import pytest

from moeprune.artifacts.errors import InputError
from moeprune.artifacts.statistics import SUMS, Layer, LayerStatistics, RoutingStatistics


def made(seed, *, domains=("a", "b"), fingerprint="f"):
    generator = np.random.default_rng(seed)
    layers = (Layer("m.0", 4, 2), Layer("m.1", 4, 2))

    def sums(scale):
        pairs = generator.random((3, 4, 4))
        rows = generator.random((4, 4))
        return LayerStatistics(
            tokens=np.array(10 * scale),
            co_count=generator.integers(1, 9, (4, 4)) * scale,
            norm_product=pairs[1] * scale,
            output_product=pairs[2] * scale,
            gate_sum=rows[0] * scale,
            norm_sum=rows[1] * scale,
            norm_square_sum=rows[2] * scale,
            gated_norm_sum=rows[3] * scale,
            output_max=generator.random(4),
        )

    half = {domain: {layer.name: sums(1) for layer in layers} for domain in domains}
    whole = {d: {n: s + sums(2) for n, s in group.items()} for d, group in half.items()}
    manifest = {
        "key": f"k{seed}",
        "model": {"fingerprint": fingerprint},
        "domains": {d: {"tokens": 30} for d in domains},
    }
    return RoutingStatistics(manifest, layers, whole, half)


def test_a_file_comes_back_as_it_was(tmp_path):
    statistics = made(0)
    statistics.save(tmp_path / "s.safetensors")
    loaded = RoutingStatistics.load(tmp_path / "s.safetensors")
    assert loaded.layers == statistics.layers
    for domain, layers in statistics.domains.items():
        for name, sums in layers.items():
            for statistic in (*SUMS, "output_max"):
                expected, found = getattr(sums, statistic), getattr(loaded.domains[domain][name], statistic)
                assert (expected is None) == (found is None)
                if expected is not None:
                    np.testing.assert_array_equal(found, expected)
                    assert found.shape == expected.shape
                    assert found.dtype == expected.dtype


def test_tensors_are_named_by_domain_block_and_statistic(tmp_path):
    from safetensors import safe_open

    made(0).save(tmp_path / "s.safetensors")
    with safe_open(tmp_path / "s.safetensors", framework="np") as file:
        names = set(file.keys())
    assert {"a/m.0/co_count", "a/m.0/half/co_count", "b/m.1/output_max"} <= names
    assert "a/m.0/half/output_max" not in names  # a maximum has no difference


def test_mix_is_the_weighted_sum():
    statistics = made(1)
    mixed = statistics.mix({"a": 3.0})["m.0"]
    a, b = statistics.domains["a"]["m.0"], statistics.domains["b"]["m.0"]
    np.testing.assert_allclose(mixed.norm_product, 3 * a.norm_product + b.norm_product)
    np.testing.assert_allclose(mixed.tokens, 3 * a.tokens + b.tokens)
    np.testing.assert_array_equal(mixed.output_max, np.maximum(a.output_max, b.output_max))
    only = statistics.mix({"b": 0.0})["m.0"]
    np.testing.assert_array_equal(only.output_max, a.output_max)
    assert statistics.mix()["m.0"].co_count.dtype == np.int64


def test_the_halves_add_to_the_whole():
    statistics = made(2)
    whole, even, odd = (statistics.mix(part=part)["m.1"] for part in ("all", "even", "odd"))
    np.testing.assert_allclose(even.norm_product + odd.norm_product, whole.norm_product)
    np.testing.assert_array_equal(even.co_count + odd.co_count, whole.co_count)


def test_two_recordings_add_domain_by_domain():
    a, b = made(3), made(4, domains=("b", "c"))
    total = a + b
    assert list(total.domains) == ["a", "b", "c"]
    expected = a.domains["b"]["m.0"].norm_product + b.domains["b"]["m.0"].norm_product
    np.testing.assert_array_equal(total.domains["b"]["m.0"].norm_product, expected)
    assert total.manifest["domains"]["b"]["tokens"] == 60
    assert total.key not in (a.key, b.key)


def test_statistics_of_two_models_do_not_add():
    with pytest.raises(InputError, match="two different models"):
        made(0) + made(0, fingerprint="other")


@pytest.mark.parametrize(
    ("mix", "message"),
    [
        ({"prose": 1.0}, "unknown domain 'prose'; the statistics hold a, b"),
        ({"a": -1.0}, "selection.mix.a: -1.0"),
        ({"a": float("nan")}, "not a weight"),
        ({"a": 0.0, "b": 0.0}, "every domain has weight 0"),
    ],
)
def test_a_bad_mix_is_explained(mix, message):
    with pytest.raises(InputError, match=message):
        made(0).mix(mix)


def test_bad_files_are_explained(tmp_path):
    path = tmp_path / "s.safetensors"
    with pytest.raises(InputError, match="no such statistics file"):
        RoutingStatistics.load(path)
    path.write_bytes(b"")
    with pytest.raises(InputError, match="not a readable statistics file"):
        RoutingStatistics.load(path)
    made(0).save(path)
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(InputError, match="record again"):
        RoutingStatistics.load(path)
