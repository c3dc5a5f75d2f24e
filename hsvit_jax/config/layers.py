"""A configuration that keeps what its user set apart from what follows from it."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

import ml_collections
from flax import traverse_util

from hsvit_jax.config import schema


class Words(NamedTuple):
    """The words of --config besides the user's settings: the network's sizes, and switches."""

    network: Mapping[str, Any]
    switches: tuple[str, ...]


class Contradiction(ValueError):
    """Settings that contradict a network to start from, and those with which the start works.

    Attributes:
      problems: every contradiction.
      settings: values by 'section.key' to add; none where no setting helps.
    """

    def __init__(self, problems: str, settings: Mapping[str, Any]) -> None:
        self.problems, self.settings = problems, dict(settings)
        added = " ".join(f"--config.{k}={schema.shown(v)}" for k, v in settings.items())
        super().__init__(f"{problems}: add {added}" if added else problems)


class Settings(ml_collections.ConfigDict):
    """A configuration or one of its sections, which notes the keys that are assigned to it.

    Assigned keys are the user's, and `resolve` leaves their values unchanged. The program itself
    makes new configurations, by `make` or `filled`.
    """

    def __init__(self, initial: Any = None, type_safe: bool = True, **options: Any) -> None:
        self._keep((), None)
        super().__init__(initial, type_safe, **options)
        if isinstance(initial, Settings):
            self._keep(initial._noted, initial.words)
        else:
            self._noted.clear()

    def _keep(self, noted: Collection[str], words: Words | None) -> "Settings":
        object.__setattr__(self, "_noted", set(noted))
        object.__setattr__(self, "words", words)
        return self

    def __setitem__(self, key: str, value: Any) -> None:
        if isinstance(value, dict | ml_collections.ConfigDict) and not isinstance(value, Settings):
            value = Settings(value, self.is_type_safe)
        super().__setitem__(key, value)
        self._noted.add(key)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._keep(state["_noted"], state["words"])

    def copy_and_resolve_references(self, visit_map: dict | None = None) -> "Settings":
        """Returns a deep copy with the same noted keys."""
        return super().copy_and_resolve_references(visit_map)._keep(self._noted, self.words)

    def _own(self, whole: bool = False) -> Iterator[tuple[str, Any]]:
        for key, value in self.items():
            noted = whole or key in self._noted
            if isinstance(value, Settings):
                yield from ((f"{key}.{name}", leaf) for name, leaf in value._own(noted))
            elif noted:
                yield key, value

    def noted(self, own: Collection[str]) -> "Settings":
        """Notes the existing ones of these 'section.key' as the user's; returns itself."""
        for key, _ in schema.leaves(self):
            if key in own:
                section, _, name = key.rpartition(".")
                (self[section] if section else self)._noted.add(name)
        return self

    @property
    def user(self) -> dict[str, Any]:
        """The user's settings by 'section.key': words, assignments and overrides."""
        return dict(self._own())

    def with_user(self, user: Mapping[str, Any]) -> "Settings":
        """Returns a configuration in which the user set exactly these values."""
        return make({**dict(schema.leaves(self)), **user}, user, self.words)

    def filled(self, values: Mapping[str, Any]) -> "Settings":
        """Returns a configuration with these values, which are not the user's."""
        return make({**dict(schema.leaves(self)), **values}, self.user, self.words)


def make(
    values: Mapping[str, Any], user: Collection[str] = (), words: Words | None = None
) -> Settings:
    """Makes a locked configuration of all settings by 'section.key'; `user` names the user's."""
    made = Settings(traverse_util.unflatten_dict(values, sep=".")).noted(user)
    return made._keep(made._noted, words).lock()
