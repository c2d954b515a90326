"""Begin of a run in its folder, and the fate of the run that was there.

A new run is written beside, to `RUN.unfinished`. Then the old one is moved aside, to `RUN.replaced`,
and the new one takes its place. The old one is removed once the new one has begun: has weights or a
checkpoint; where that does not come to pass, it is put back. A kill at any moment leaves the old run
in one of the two places, and the next `train` puts it back or removes it by the same rule.
"""

import os
import pathlib
import shutil
import warnings

from dtransformer.errors import InputError
from dtransformer.files import beside, is_partial
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

_FRESH, _ASIDE = ".unfinished", ".replaced"


class RunFolder:
    """The folder of a run that is trained. Only rank 0 writes to it.

    Args:
        path: the folder.

    Attributes:
        fresh: the folder that a new run is written to, and becomes `path` when it begins.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = pathlib.Path(path)
        self._real = pathlib.Path(os.path.realpath(path))  # of a link, what it points to
        self.fresh, self._aside = beside(self._real, _FRESH), replaced_run(path)
        self._made = []  # folders that were not there before
        self._is_new = False

    def is_in_order(self) -> bool:
        """Return whether no kill has left something that `recover` puts in order."""
        return not os.path.exists(self.fresh) and not is_run(self._aside)

    def check(self, config_path: str | os.PathLike, overwrite: bool, resume: bool) -> bool:
        """Return whether training goes on from a checkpoint; only look.

        Args:
            config_path: the config file, which is not to be replaced.
            overwrite, resume: as in `train`.

        Raises:
            InputError: something is there that may not be replaced.
        """
        folder = self._real
        names = _names_in(folder, self.path)
        if not names:
            return False
        if RUN not in names:
            raise InputError(
                f"{self.path}: is not empty, and no run folder (it has no {RUN}): give another "
                "--run, or remove it yourself"
            )
        RunIdentity.load(folder)
        if resume and _can_resume(folder, self.path):
            return True
        if not overwrite and not (resume and not _has_begun(folder)):
            ways = "--resume, " * bool(saved_steps(folder / CHECKPOINTS)) + "or another --run"
            raise InputError(f"{self.path}: holds a run already; give --overwrite, {ways}")
        _check_parts_only(names, self.path)
        if folder in pathlib.Path(config_path).resolve().parents:
            raise InputError(
                f"{config_path}: lies in the run folder that is to be replaced: copy it elsewhere "
                "first"
            )
        return False

    def recover(self) -> None:
        """Put in order what a kill has left.

        Raises:
            InputError: something there is no part of a run.
        """
        _remove_run(self.fresh, self.fresh)
        if is_run(self._aside):
            self._keep_one()
        if is_run(self._real):
            for path in self._real.iterdir():
                if is_partial(path.name):
                    path.unlink(missing_ok=True)
        self._made = [one for one in (self._real, *self._real.parents) if not os.path.exists(one)]

    def begin(self, config: RunConfig, tokenizer: object, data: dict[str, str | None]) -> None:
        """Begin a new run; an old one that is there is moved aside.

        Args:
            config: the run's config.
            tokenizer: its tokenizer, an object with `save(folder)`.
            data: the checksums of its records; see `RunIdentity`.

        Raises:
            InputError: the folder cannot be written; the old run is where it was.
        """
        try:
            self.fresh.mkdir(parents=True, exist_ok=True)
            save_config(config, self.fresh / CONFIG)
            tokenizer.save(self.fresh / TOKENIZER)
            RunIdentity.new(self.fresh, data).save(self.fresh / RUN)
            if is_run(self._real):
                os.rename(self._real, self._aside)
            os.rename(self.fresh, self._real)  # an empty folder is replaced
            self._is_new = True
        except (OSError, InputError) as error:
            shutil.rmtree(self.fresh, ignore_errors=True)
            self._take_back()
            reason = getattr(error, "strerror", None) or error
            raise InputError(f"{self.path}: the run folder cannot be written ({reason})") from None

    def settle(self) -> None:
        """Keep the new run if it has begun, else put the old one back; without `begin`, too.

        Raises:
            InputError: something there is no part of a run, or cannot be removed.
        """
        if self._is_new:
            self._keep_one()
        else:
            shutil.rmtree(self.fresh, ignore_errors=True)
            self._take_back()

    def remove_replaced(self) -> None:
        """Remove the old run if the new one has begun; warn where it cannot be."""
        try:
            if self._is_new and _has_begun(self._real):
                _remove_run(self._aside, self._aside)
        except InputError as error:  # training goes on
            warnings.warn(f"the run that was replaced: {error}", stacklevel=2)

    def _keep_one(self):
        if _has_begun(self._real):
            _remove_run(self._aside, self._aside)
        else:
            _remove_run(self._real, self.path)
            self._take_back()

    def _take_back(self):
        """Put the old run back where there is one; leave no folder that was made."""
        if os.path.exists(self._real):
            return
        if is_run(self._aside):
            os.rename(self._aside, self._real)
        elif self._real not in self._made:
            self._real.mkdir(exist_ok=True)
        for folder in self._made:
            if folder.is_dir() and not os.listdir(folder):
                folder.rmdir()


def replaced_run(path: str | os.PathLike) -> pathlib.Path:
    """Return where the run is that is being replaced in a folder, as long as it is kept."""
    return beside(os.path.realpath(path), _ASIDE)


def _can_resume(folder, path):
    """Return whether a run has a complete checkpoint; refuse where it only had some."""
    if saved_steps(folder / CHECKPOINTS):
        return True
    lost = folders_without_manifest(folder / CHECKPOINTS)
    if lost:
        raise InputError(
            f"{path}: no checkpoint is complete, {lost[-1].name} has lost its checkpoint.json: put it "
            "back; or begin anew with --overwrite, which removes all"
        )
    if _has_begun(folder):
        raise InputError(
            f"{path}: has weights, and no checkpoint to resume from: begin anew with --overwrite, or "
            "give another --run"
        )
    return False


def _has_begun(folder):
    """Return whether there is something to compute with, or to resume from."""
    return any(os.path.lexists(folder / x) for x in (WEIGHTS, ADAPTERS)) or bool(
        saved_steps(folder / CHECKPOINTS)
    )


def _names_in(folder, path):
    """Return what is in a folder; nothing where there is none."""
    try:
        return sorted(os.listdir(folder))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise InputError(f"{path}: is no folder for a run ({error.strerror})") from None


def _check_parts_only(names, path):
    others = [name for name in names if name not in PARTS and not is_partial(name)]
    if others:
        raise InputError(
            f"{path}: also holds {others[0]}, which is no part of a run: move it elsewhere first"
        )


def _remove_run(folder, path):
    """Remove a folder with nothing but parts of a run, if it is there."""
    _check_parts_only(_names_in(folder, path), path)
    try:
        if os.path.exists(folder):
            shutil.rmtree(folder)
    except OSError as error:
        raise InputError(f"{path}: cannot be removed ({error.strerror})") from None
