"""Every name that a family or a replacement needs upstream exists as it was written against."""

from __future__ import annotations

import pytest

from opake import families, flags, plan, symbols
from opake.errors import UnsupportedTransformers
from opake.symbols import Symbol


@pytest.mark.parametrize("model_type", families.supported())
def test_upstream_has_what_the_family_needs(model_type):
    family = families.find(model_type)
    wanted = plan.needed(family, flags.resolve())
    assert any(symbol.module == family.module for symbol in wanted)
    symbols.verify(wanted)


@pytest.mark.parametrize("model_type", families.supported())
def test_upstream_has_every_class_that_the_family_names(model_type):
    family = families.find(model_type)
    names = (family.base, *family.attention, *family.masks, family.mlp, family.experts)
    assert len(set(names)) >= 3
    symbols.verify(Symbol(family.module, name) for name in names if name)


def test_a_mismatch_says_where_what_and_how_to_do_without():
    wanted = [
        Symbol("transformers.masking_utils", "no_such_builder", (), "vmap_masking"),
        Symbol("transformers.no_such_module", "x", (), "sdpa"),
        Symbol("transformers.masking_utils", "sdpa_mask", ("colour", "q_length"), "sdpa"),
    ]
    with pytest.raises(UnsupportedTransformers) as caught:
        symbols.verify(wanted)
    text = str(caught.value)
    assert "3 mismatch(es)" in text
    assert "transformers/masking_utils.py:no_such_builder: expected to exist" in text
    assert "transformers/no_such_module.py:x" in text
    assert "vmap_masking=False" in text
    assert "expected parameters colour, found (batch_size, " in text


def test_either_of_two_names_is_enough():
    names = ("cache|past_key_values", "config")
    symbols.verify([Symbol("transformers.masking_utils", "create_causal_mask", names)])
