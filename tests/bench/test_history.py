"""Result files: their names, and the last one of the same kind."""

import pytest
import torch

from condense.bench.history import last_result, read_result, result_path
from condense.results import write_results

CPU = torch.device("cpu")


def write(folder, name, kind="kernel"):
    return write_results(folder / name, {"kind": kind, "rows": []})


def test_the_last_result_is_of_the_same_kind_shape_and_device(tmp_path):
    path = result_path(tmp_path, "kernel", "h4-kv2", CPU)
    stem = path.stem.rpartition("-")[0]
    assert last_result(tmp_path, "kernel", "h4-kv2", CPU) is None
    write(tmp_path, f"{stem}-20250101T000000Z.json")
    newest = write(tmp_path, f"{stem}-20250301T000000Z.json")
    write(tmp_path, f"{stem}-b2-20250401T000000Z.json")
    write(tmp_path, f"{stem.replace('kernel', 'model')}-20250401T000000Z.json")
    found, document = last_result(tmp_path, "kernel", "h4-kv2", CPU)
    assert found == newest
    assert document["results"]["rows"] == []


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"results": {"kind": "else"}, "provenance": {}}', "\xff"])
def test_other_files_are_refused(tmp_path, text):
    path = tmp_path / "a.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match="no result file of condense bench"):
        read_result(path)
