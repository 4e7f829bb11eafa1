"""What a recipe's callback notes in a run, kept with the checkpoints."""

from typing import Any, ClassVar


class Recording:
    """First base of a callback whose notes a continued fit needs: a checkpoint has them.

    Attributes:
        recorded: names of the attributes: tensors, numbers, lists, tuples and dicts of them, and generators of torch.
    """

    recorded: ClassVar[tuple[str, ...]]

    def state_dict(self) -> dict[str, Any]:
        """Return the notes, of a generator its state."""
        notes = {name: getattr(self, name) for name in self.recorded}
        return {name: note.get_state() if hasattr(note, "get_state") else note for name, note in notes.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the notes of a checkpoint.

        Args:
            state_dict: what `state_dict` returned.
        """
        for name in self.recorded:
            own = getattr(self, name)
            if hasattr(own, "set_state"):
                own.set_state(state_dict[name].cpu())
            else:
                setattr(self, name, state_dict[name])
