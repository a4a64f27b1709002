"""Result files: what is stamped and converted, that none is overwritten or left half written, and fingerprints."""

import errno
import json
import os
import signal
import stat
import time
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from fresh import finish, start
from tokenizers import Tokenizer, models

import condense
from condense.files import sole_writer, whole_folder
from condense.results import fingerprint, refuse_existing, write_results

FULL = OSError(28, "No space left on device"), r"No space left on device: '.*/r\.json'"


@dataclass(frozen=True)
class Point:
    length: int
    seconds: float


def test_content_is_converted_and_stamped(tmp_path):
    given = {"points": [Point(8, float("nan"))], "loss": torch.tensor(2.0), "method": condense.Dense(), "in": Path("a")}
    written = {"points": [{"length": 8, "seconds": None}], "loss": 2.0, "method": {"method": "dense"}, "in": "a"}
    # a name may be as long as the file system takes
    path = write_results(tmp_path / "deep" / ("r" * 250 + ".json"), given, seed=3)
    document = json.loads(path.read_text())
    stamp = document["provenance"]
    assert (document["results"], stamp["seed"], stamp["torch"]) == (written, 3, torch.__version__)
    assert {"condense", "transformers", "python", "device", "commit", "date"} <= stamp.keys()


@pytest.mark.parametrize("links", [True, False], ids=["hard-links", "none"])
def test_a_file_that_appears_in_between_is_kept_unless_told(links, tmp_path, monkeypatch):
    path, dump = tmp_path / "r.json", json.dump
    if not links:
        monkeypatch.setattr(os, "link", Mock(side_effect=OSError(1, "Operation not permitted")))

    def slow(*args, **kwargs):
        dump(*args, **kwargs)
        path.write_text("somebody else's")

    monkeypatch.setattr(json, "dump", slow)
    with pytest.raises(ValueError, match=r"path: wanted a path that does not exist yet, got .*r.json"):
        write_results(path, {"a": 1})
    assert path.read_text() == "somebody else's"
    assert list(tmp_path.iterdir()) == [path]
    write_results(path, {"a": 1}, overwrite=True)
    assert json.loads(path.read_text())["results"] == {"a": 1}


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o007, 0o660), (0o077, 0o600)])
def test_the_umask_says_who_may_read_a_file(umask, mode, tmp_path):
    before = os.umask(umask)
    try:
        path = write_results(tmp_path / "r.json", {"a": 1})
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == mode


@pytest.mark.parametrize(("error", "said"), [(KeyboardInterrupt(), None), FULL], ids=["interrupt", "full"])
def test_what_stops_the_writing_leaves_nothing_and_a_full_disk_is_named(tmp_path, monkeypatch, error, said):
    def stop(*args, **kwargs):
        args[1].write('{"half')
        raise error

    monkeypatch.setattr(json, "dump", stop)
    with pytest.raises(type(error), match=said):
        write_results(tmp_path / "r.json", {"a": 1})
    assert list(tmp_path.iterdir()) == []


FULL_BY = {
    "tokenizers": (lambda file: Tokenizer(models.BPE()).save(str(file)), r"No space left on device: '.*/d'"),
    "numpy": (lambda file: np.zeros(2**16).tofile(file), r"could not write .*/d: .* written"),
}


@pytest.mark.parametrize(("write", "said"), FULL_BY.values(), ids=FULL_BY)
def test_a_full_disk_is_an_error_of_the_system_whoever_writes(tmp_path, write, said):
    def fill():
        with whole_folder(tmp_path / "d") as folder:
            (folder / "file").symlink_to("/dev/full")
            write(folder / "file")

    with pytest.raises(OSError, match=said):
        fill()
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_while_a_file_gets_its_name_leaves_it_whole(tmp_path, monkeypatch):
    """Under its hidden name; an empty file of the wanted name would be taken for a result."""
    for name in ("link", "replace"):
        monkeypatch.setattr(os, name, Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        write_results(tmp_path / "r.json", {"a": 1})
    (left,) = tmp_path.iterdir()
    assert left.suffix == ".part"
    assert json.loads(left.read_text())["results"] == {"a": 1}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_any_changed_weight_changes_the_fingerprint(dtype, monkeypatch):
    monkeypatch.setattr("condense.results._AT_ONCE", 100)
    torch.manual_seed(0)
    model = torch.nn.Linear(25, 40).to(dtype)
    before = fingerprint(model)
    assert fingerprint(model) == before
    weight = model.weight.detach()
    kept = weight.clone()
    for change in (lambda: weight[20, 12].mul_(-1), lambda: weight[20, 13].add_(1), lambda: weight.mul_(1.25)):
        change()
        assert fingerprint(model) != before
        weight.copy_(kept)
    assert fingerprint(model) == before
    assert fingerprint(torch.nn.Linear(40, 25).to(dtype)) != before


def hold(output):
    with sole_writer(output):
        output.touch()
        time.sleep(600)


def test_one_process_at_a_time_writes_until_it_dies(tmp_path, monkeypatch):
    output = tmp_path / "output"
    first = start(hold, output)
    while not output.exists() and first.is_alive():
        time.sleep(0.01)
    with pytest.raises(ValueError, match=f"no other run writes, got {output}, .* choose another"), sole_writer(output):
        pass
    first.kill()
    assert finish(first) == [-signal.SIGKILL]
    with sole_writer(output), sole_writer(tmp_path / "another"):
        pass
    with sole_writer(tmp_path):  # a folder that one is in, too
        monkeypatch.chdir(tmp_path)
        with pytest.raises(ValueError, match=f"no other run writes, got {tmp_path}"), sole_writer(Path(".")):
            pass
    assert list(tmp_path.iterdir()) == [output]


def test_paths_that_cannot_be_written(tmp_path):
    """A lock below a file; a pipe, which a result would replace by a file."""
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "pipe")
    below = tmp_path / "file" / "x"
    with pytest.raises(ValueError, match="output: wanted a path that can be written, got"), sole_writer(below):
        pass
    with pytest.raises(ValueError, match="json: wanted a file, got the device or pipe"):
        refuse_existing(tmp_path / "pipe", "json", overwrite=True)
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    with pytest.raises(ValueError, match=r"output: wanted a path that does not exist yet, got .*link"):
        refuse_existing(tmp_path / "link", "output")


def test_a_file_system_without_locks_is_written_with_a_warning(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("fcntl.flock", Mock(side_effect=OSError(errno.ENOLCK, "No locks available")))
    monkeypatch.chdir(tmp_path)
    with sole_writer(Path(".") / "output"):
        pass
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert f"{tmp_path} has no locks (No locks available)" in caplog.text
