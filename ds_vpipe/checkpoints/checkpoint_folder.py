"""Which folder a checkpoint's files lie in, also after a save that was killed."""

from __future__ import annotations

from pathlib import Path

from ds_vpipe.errors import VPipeError


def checkpoint_folder(directory: str | Path, tag: str | None = None) -> Path:
    """The folder that holds a checkpoint's files.

    Args:
        directory: what was given to ``save_checkpoint()``, or the checkpoint's own folder.
        tag: which checkpoint; default: the one that the file ``latest`` names.

    Raises:
        VPipeError: there is none.
    """
    root = Path(directory)
    if tag is None:
        if any(root.glob("mp_rank_*_model_states.pt")):
            return root
        latest = root / "latest"
        if not latest.is_file():
            raise VPipeError(
                f"checkpoint: got {str(root)!r}, which has neither a file 'latest' nor mp_rank_*_model_states.pt; "
                f"allowed is a directory written by save_checkpoint(); correct the path or name a tag"
            )
        tag = latest.read_text(encoding="utf-8").strip()
    set_aside = root / tag
    set_aside = set_aside.with_name(f".{set_aside.name}.previous")
    if not (root / tag).exists() and set_aside.exists():
        return set_aside  # a save was killed between two renamings; the next load puts it back
    if not any((root / tag).glob("mp_rank_*_model_states.pt")):
        tags = sorted(path.parent.name for path in root.glob("[!.]*/mp_rank_00_model_states.pt"))
        raise VPipeError(f"checkpoint: got tag {tag!r} in {str(root)!r}; allowed: {tags}; correct the tag")
    return root / tag
