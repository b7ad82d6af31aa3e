"""The fields of a `config.json`, each of which somebody has to ask for: what is left over is an error that names it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

from mcjax.errors import ConfigError

WITHOUT_EFFECT = frozenset(
    # What the file is of, and how transformers runs it.
    "architectures auto_map transformers_version _name_or_path use_cache cache_implementation return_dict torchscript"
    " return_dict_in_generate output_attentions output_hidden_states output_router_logits chunk_size_feed_forward"
    " problem_type id2label label2id tokenizer_class task_specific_params pretraining_tp _attn_implementation"
    " _attn_implementation_autoset"
    # Token ids: those of the tokenizer count.
    " bos_token_id eos_token_id pad_token_id unk_token_id sep_token_id cls_token_id decoder_start_token_id"
    # Training alone.
    " initializer_range attention_dropout router_aux_loss_coef router_jitter_noise aux_loss_alpha seq_aux".split()
)
"""Fields that change nothing in what a model here computes, whatever they hold."""

_UNSAID: Any = object()


class Fields:
    """Reads the fields of one mapping. `place` is where it lies in the file, for messages.

    `default` is for a field that is absent or null. All readers raise `ConfigError` with the field's name: for a value
    of another kind, and without `default` for none.
    """

    def __init__(self, values: Mapping[str, Any], place: str = ""):
        self._values = values
        self._place = place
        self._known: set[str] = set()
        self._parts: list[Fields] = []
        self._assumed: dict[str, Any] = {}

    def assume(self, **values: Any) -> None:
        """What the family takes for fields that are absent. One that is there and null stays null."""
        self._assumed.update(values)

    def name(self, key: str) -> str:
        """Of a field, with the mapping that it lies in."""
        return f"{self._place}.{key}" if self._place else key

    def ignore(self, *keys: str) -> None:
        """These have no effect."""
        self._known.update(keys)

    def integer(self, key: str, default: int = _UNSAID) -> int:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._refused(key, value, "a whole number")
        return value

    def number(self, key: str, default: float = _UNSAID) -> float:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._refused(key, value, "a number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self._refused(key, value, "true or false")
        return value

    def text(self, key: str, default: str = _UNSAID) -> str:
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self._refused(key, value, "text")
        return value

    def sequence(self, key: str) -> list[Any]:
        """Empty where it is absent."""
        value: object = self._get(key, [])
        if not isinstance(value, Iterable) or isinstance(value, str | bytes | Mapping):
            raise self._refused(key, cast("object", value), "a list")
        return list(cast("Iterable[Any]", value))

    def part(self, key: str) -> Fields | None:
        """A mapping inside, whose fields have to be asked for too; None where it is absent or empty."""
        value = self._get(key, None)
        if value is None or value == {}:
            return None
        if not isinstance(value, Mapping):
            raise self._refused(key, value, "a mapping")
        found = Fields(cast("Mapping[str, Any]", value), self.name(key))
        self._parts.append(found)
        return found

    def only(self, key: str, *served: object) -> None:
        """Raise for a value that is not among those whose effect is known here. Absent is fine."""
        value = self._get(key, None)
        if value is not None and value not in served:
            raise ConfigError(self.name(key), value, "is not supported", served)

    def refuse_the_rest(self) -> None:
        """Raise for the first field that nobody asked for and that has an effect, as far as is known."""
        for key, value in self._values.items():
            if key not in self._known and key not in WITHOUT_EFFECT:
                raise ConfigError(
                    self.name(key), value, "is not a field whose effect is known here; the model may need it"
                )
        for part in self._parts:
            part.refuse_the_rest()

    def _get(self, key: str, default: Any) -> Any:
        self._known.add(key)
        value = self._values.get(key, self._assumed.get(key))
        if value is not None:
            return value
        if default is _UNSAID:
            raise ConfigError(self.name(key), value, "the config of this family needs this field")
        return default

    def _refused(self, key: str, value: object, wanted: str) -> ConfigError:
        return ConfigError(self.name(key), value, f"must be {wanted}")
