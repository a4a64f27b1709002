"""Fields of a recipe that have the wrong type are refused by name; a run's record tells other weights apart."""

import pytest

from condense.train import RECIPES, read_recipe
from condense.train.record import summary


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('data = "a.txt"', r"data: wanted a list, got 'a.txt' in .*recipe.toml"),
        ("method = 3", r"method: wanted a text, got 3 in .*recipe.toml"),
        ("data_weights = 2", r"data_weights: wanted a list, got 2 in .*recipe.toml"),
        ("data_weights = [1, 2]", "data_weights: wanted one for each of 1 data files, got 2"),
        ("keys = 3", r"keys: wanted a list, got 3 in .*recipe.toml"),
        ('steps = "40"', "steps must be an integer"),
        ('gradient_checkpointing = "no"', "gradient_checkpointing must be True or False"),
    ],
)
def test_wrong_types(tmp_path, line, message):
    path = tmp_path / "recipe.toml"
    path.write_text(line)
    with pytest.raises(ValueError, match=message):
        RECIPES["adapt"](
            [tmp_path / "a"], tmp_path / "b", **{"pretrained": "base", "method": "cca"} | read_recipe(path)
        )


def test_the_record_tells_other_weights_of_the_data_apart(tmp_path):
    files = [tmp_path / "a", tmp_path / "b"]
    runs = [
        RECIPES["adapt"](files, tmp_path / "c", pretrained="base", method="cca", data_weights=weights)
        for weights in ([], [1, 1], [2, 1])
    ]
    records = [summary(run) for run in runs]
    assert records[0] != records[1] != records[2]


@pytest.mark.parametrize("change", [{"train": "all"}, {"lora_rank": 2}, {"lora_targets": "qkv"}])
def test_the_record_tells_trained_weights_apart(tmp_path, change):
    settings = {"pretrained": "base", "method": "cca", "train": "lora"}
    one, other = (
        RECIPES["adapt"]([tmp_path / "a"], tmp_path / "b", **fields) for fields in (settings, settings | change)
    )
    assert summary(one) != summary(other)
