"""Fields of a recipe file that have the wrong type are refused by name."""

import pytest

from condense.train import RECIPES, read_recipe


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('data = "a.txt"', r"data: wanted a list, got 'a.txt' in .*recipe.toml"),
        ("method = 3", r"method: wanted a text, got 3 in .*recipe.toml"),
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
