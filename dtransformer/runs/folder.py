"""Create a run folder, and replace or restore an existing run.

A new run is first written to `RUN.unfinished`. Then the old run is renamed to `RUN.replaced`, and the
new run is renamed to `RUN`. The old run is removed as soon as the new run has weights or a checkpoint.
If the new run ends before that, the old run is restored. A kill at any moment leaves the old run in
`RUN` or `RUN.replaced`. The next `train` then restores or removes it by the same rule.
"""

import os
import pathlib
import shutil
import warnings

from dtransformer.errors import InputError
from dtransformer.files import append_to_name, is_partial
from dtransformer.runs.config import RunConfig, save_config
from dtransformer.runs.identity import (
    ADAPTERS,
    CHECKPOINTS,
    CONFIG,
    PARTS,
    TOKENIZER,
    WEIGHTS,
    RunIdentity,
    is_run,
)
from dtransformer.trainers.checkpoint.export import RUN
from dtransformer.trainers.checkpoint.folders import folders_without_manifest, saved_steps

_UNFINISHED_SUFFIX = ".unfinished"
_REPLACED_SUFFIX = ".replaced"


class RunFolder:
    """Folder of a run in training. Only rank 0 may call the methods that write.

    Args:
        path: Path of the folder, or of a link to it.

    Attributes:
        path: Path of the folder.
        fresh: Path of the folder that a new run is written to. `begin` renames it to `path`.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = pathlib.Path(path)
        self._real_path = pathlib.Path(os.path.realpath(path))
        self.fresh = append_to_name(self._real_path, _UNFINISHED_SUFFIX)
        self._replaced = replaced_run(path)
        self._created = []  # folders that did not exist before
        self._is_new = False

    def is_in_order(self) -> bool:
        """Return whether no earlier process left a folder that `recover` must clean up."""
        return not os.path.exists(self.fresh) and not is_run(self._replaced)

    def check(self, config_path: str | os.PathLike, overwrite: bool, resume: bool) -> bool:
        """Return whether training resumes from a checkpoint, without changing any file.

        Args:
            config_path: Path of the config file. It must lie outside a run that is replaced.
            overwrite: Boolean. Whether to replace an existing run.
            resume: Boolean. Whether to resume if a checkpoint exists.

        Raises:
            InputError: If the folder contains a run that may not be replaced, or other files.
        """
        folder = self._real_path
        names = _list_folder(folder, self.path)
        if not names:
            return False
        if RUN not in names:
            raise InputError(
                f"`{self.path}` is not empty, and is not a run folder (it has no {RUN}). Choose "
                "another --run, or remove the folder yourself."
            )
        RunIdentity.load(folder)
        if resume and _can_resume(folder, self.path):
            return True
        if not overwrite and not (resume and not _has_begun(folder)):
            ways = "--resume or --overwrite" if saved_steps(folder / CHECKPOINTS) else "--overwrite"
            raise InputError(
                f"`{self.path}` already contains a run. Add {ways}, or choose another --run."
            )
        _check_parts_only(names, self.path)
        if folder in pathlib.Path(config_path).resolve().parents:
            raise InputError(
                f"`{config_path}` is inside the run folder to replace. Copy it to another folder."
            )
        return False

    def recover(self) -> None:
        """Clean up after a process that was killed.

        Removes unfinished runs and partially written files. Removes the replaced run if the new one
        has weights or a checkpoint, and restores it otherwise.

        Raises:
            InputError: If a folder that must be removed contains files of other programs.
        """
        _remove_run(self.fresh, self.fresh)
        if is_run(self._replaced):
            self._keep_valid_run()
        if is_run(self._real_path):
            for path in self._real_path.iterdir():
                if is_partial(path.name):
                    path.unlink(missing_ok=True)
        self._created = [
            folder
            for folder in (self._real_path, *self._real_path.parents)
            if not os.path.exists(folder)
        ]

    def begin(self, config: RunConfig, tokenizer: object, data: dict[str, str | None]) -> None:
        """Create the folder of a new run. An existing run is renamed to `RUN.replaced`.

        Args:
            config: Config of the run.
            tokenizer: Tokenizer of the run, an object with `save(folder)`.
            data: Checksums of the records, see `RunIdentity`.

        Raises:
            InputError: If the folder cannot be written. The old run is then restored.
        """
        try:
            self.fresh.mkdir(parents=True, exist_ok=True)
            save_config(config, self.fresh / CONFIG)
            tokenizer.save(self.fresh / TOKENIZER)
            RunIdentity.new(self.fresh, data).save(self.fresh / RUN)
            if is_run(self._real_path):
                os.rename(self._real_path, self._replaced)
            os.rename(self.fresh, self._real_path)  # This also replaces an empty folder.
            self._is_new = True
        except (OSError, InputError) as error:
            shutil.rmtree(self.fresh, ignore_errors=True)
            self._restore_old_run()
            reason = getattr(error, "strerror", None) or error
            raise InputError(f"Cannot write the run folder `{self.path}` ({reason}).") from None

    def keep_or_restore(self) -> None:
        """Keep the new run if it has weights or a checkpoint. Otherwise restore the old run.

        It may also be called if `begin` was not reached.

        Raises:
            InputError: If a run cannot be removed, or its folder contains files of other programs.
        """
        if self._is_new:
            self._keep_valid_run()
        else:
            shutil.rmtree(self.fresh, ignore_errors=True)
            self._restore_old_run()

    def remove_replaced(self) -> None:
        """Remove the old run if the new one has weights or a checkpoint. Warn if that fails."""
        try:
            if self._is_new and _has_begun(self._real_path):
                _remove_run(self._replaced, self._replaced)
        except InputError as error:
            warnings.warn(f"Cannot remove the replaced run: {error}", stacklevel=2)

    def _keep_valid_run(self):
        if _has_begun(self._real_path):
            _remove_run(self._replaced, self._replaced)
        else:
            _remove_run(self._real_path, self.path)
            self._restore_old_run()

    def _restore_old_run(self):
        """Restore the old run, if any, and remove the empty folders that this object created."""
        if os.path.exists(self._real_path):
            return
        if is_run(self._replaced):
            os.rename(self._replaced, self._real_path)
        elif self._real_path not in self._created:
            self._real_path.mkdir(exist_ok=True)
        for folder in self._created:
            if folder.is_dir() and not os.listdir(folder):
                folder.rmdir()


def replaced_run(path: str | os.PathLike) -> pathlib.Path:
    """Return the path `RUN.replaced`, where the old run of the folder `path` waits for its removal."""
    return append_to_name(os.path.realpath(path), _REPLACED_SUFFIX)


def _can_resume(folder, path):
    """Return whether a run has a complete checkpoint.

    Raises:
        InputError: If no checkpoint is complete, but the run has weights or incomplete checkpoints,
            which a new run would overwrite.
    """
    if saved_steps(folder / CHECKPOINTS):
        return True
    incomplete = folders_without_manifest(folder / CHECKPOINTS)
    if incomplete:
        raise InputError(
            f"`{path}` has no complete checkpoint: {incomplete[-1].name} has lost its "
            "checkpoint.json. Restore this file, or start from scratch with --overwrite, which removes "
            "the run."
        )
    if _has_begun(folder):
        raise InputError(
            f"`{path}` has weights, but no checkpoint to resume from. Start from scratch with "
            "--overwrite, or choose another --run."
        )
    return False


def _has_begun(folder):
    """Return whether a run has weights or a checkpoint."""
    return any(os.path.lexists(folder / x) for x in (WEIGHTS, ADAPTERS)) or bool(
        saved_steps(folder / CHECKPOINTS)
    )


def _list_folder(folder, path):
    """Return the sorted names in a folder, or an empty list if it does not exist."""
    try:
        return sorted(os.listdir(folder))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise InputError(f"Cannot use `{path}` as a run folder ({error.strerror}).") from None


def _check_parts_only(names, path):
    foreign_names = [name for name in names if name not in PARTS and not is_partial(name)]
    if foreign_names:
        raise InputError(
            f"`{path}` also contains {foreign_names[0]}, which does not belong to a run. Move it to "
            "another folder."
        )


def _remove_run(folder, path):
    """Remove a run folder, if it exists and contains nothing else."""
    _check_parts_only(_list_folder(folder, path), path)
    try:
        if os.path.exists(folder):
            shutil.rmtree(folder)
    except OSError as error:
        raise InputError(f"Cannot remove `{path}` ({error.strerror}).") from None
