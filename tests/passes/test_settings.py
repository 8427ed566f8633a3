"""Settings of planning: what they are by default, and how one field is changed."""

from __future__ import annotations

import pytest

from whale.passes.settings import BatchSettings, ExchangeSettings, PlanSettings, ZeroSettings


def test_a_number_of_ranks_is_enough() -> None:
    settings = PlanSettings(size=4)
    assert settings.batch == BatchSettings() and settings.exchange.backend == "whale"
    assert settings.time.micro_batches == 1 and settings.zero.level == 0 and not settings.split.state_only


def test_fields_of_groups_are_changed_by_their_names() -> None:
    settings = PlanSettings(size=4, exchange=ExchangeSettings(wire_dtype="bfloat16"))
    changed = settings.but(size=2, zero__level=1, zero__min_bytes=64, exchange__group_bytes=0)
    assert changed == PlanSettings(
        size=2, zero=ZeroSettings(1, 64), exchange=ExchangeSettings(0, wire_dtype="bfloat16")
    )
    assert settings.size == 4 and settings.zero == ZeroSettings()
    assert settings.but(zero=ZeroSettings(3)) == settings.but(zero__level=3)


@pytest.mark.parametrize("name", ["zero__levels", "zeros__level", "level", "but__level", "size__level"])
def test_a_field_that_does_not_exist(name: str) -> None:
    with pytest.raises(TypeError):
        PlanSettings(size=4).but(**{name: 1})
