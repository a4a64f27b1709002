"""What several folders share: a small text with its tokenizer and corpus, the backends, and which cells run when."""

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerBase

from condense.ops.torch import attend as torch_attend
from condense.tasks import Corpus, encode_corpus
from condense.train import train_tokenizer

# kernels need a GPU or, in a process of their own, Triton's interpreter
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
collect_ignore = [
    *([] if torch.cuda.is_available() else ["gpu"]),
    *(
        []
        if torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
        else ["gpu/test_hopper.py", "gpu/test_recall_hopper.py"]
    ),
    *([] if torch.cuda.is_available() or _INTERPRETED else ["triton_kernels"]),
]

# Grids of dear cells, with how many of them are in `make test`: those that bring a value of a parameter that no other
# has come first. All others are `slow`, for `make test-all`. That every method equals its definition on every backend
# is proved cell by cell in test_functional.py and test_latent.py: these ask for something else.
DEAR = {
    "caches/test_cache_bytes.py::test_bytes_after_prefill_and_decode": 8,
    "caches/test_static_layer.py::test_300_steps_and_chunks_equal_the_growing_layer": 10,
    "caches/test_static_layer.py::test_the_host_does_not_trust_its_count_once_steps_are_recorded": 6,
    "caches/test_static_recall.py::test_300_steps_and_chunks_equal_the_growing_layer_and_the_whole": 8,
    "methods/test_causality.py::test_a_changed_token_leaves_earlier_outputs_bit_equal": 32,
    "methods/test_dga.py::test_importance_is_the_papers": 5,
    "methods/test_dga.py::test_padded_prompts": 12,
    "methods/test_dga.py::test_prompts_of_every_length": 9,
    "methods/test_parity.py::test_extend_any_chunks_equal_one_call": 168,
    "methods/test_parity.py::test_extend_ragged_rows": 120,
    "models/test_generate.py::test_modes_with_cache_equal_without": 10,
    "models/test_generate.py::test_padded_batch_equals_single_rows_and_no_cache": 16,
    "models/test_generate.py::test_prefill_in_chunks": 8,
    "models/test_graph.py::test_tokens_of_generate_prompt_after_prompt": 3,
    "models/test_latent.py::test_300_steps_give_what_one_forward_gives": 4,
    "models/test_latent.py::test_projections_that_only_run": 4,
    "models/test_parity.py::test_a_later_token_leaves_earlier_logits_bit_equal": 80,
    "models/test_parity.py::test_full_forward_chunks_and_steps_agree": 48,
    "models/test_select.py::test_a_padded_batch_in_a_static_cache": 10,
    "models/test_static.py::test_a_padded_batch": 10,
    "models/test_static.py::test_compiled_decode_is_one_graph": 3,
    "models/test_static.py::test_generate_compiles_its_decode": 2,
    "models/test_static.py::test_modes": 10,
    "ops/test_error_budget.py::test_gradients_within_twice_the_eager_error": 9,
    "ops/test_error_budget.py::test_output_within_twice_the_eager_error": 18,
    "ops/test_gradients.py::test_gradcheck": 12,
    "ops/test_gradients.py::test_gradients_equal_the_definitions": 48,
    "ops/test_gradients.py::test_huge_logits": 48,
    "ops/test_gradients.py::test_layouts": 48,
    "ops/test_gradients.py::test_poisoned_padding_reaches_nothing": 108,
    "ops/test_hopper_compiles.py::test_two_part_keys_fit_into_shared_memory": 1,
    "ops/test_step.py::test_300_steps_equal_the_whole": 16,
    "ops/test_step.py::test_entries_are_those_of_the_growing_path_to_the_bit": 35,
    "ops/test_step.py::test_one_graph_for_all_steps": 6,
    "ops/test_step.py::test_rows_that_are_not_real": 35,
    "test_compile.py::test_attention": 3,
    "test_compile.py::test_attention_by_the_default_compiler": 2,
    "test_compile.py::test_training_forward_of_a_model": 2,
    "test_functional.py::test_attention_left_padding": 145,
    "test_latent.py::test_any_chunks_absorbed_or_expanded_equal_one_call": 120,
    "train/test_training.py::test_a_resumed_run_equals_an_uninterrupted_one": 1,
    "triton_kernels/test_attend.py::test_output_lse_and_gradients_within_budget": 6,
    "triton_kernels/test_growing_layer.py::test_a_first_token_is_a_prompt": 4,
    "triton_kernels/test_growing_layer.py::test_a_step_is_one_operation": 4,
    "triton_kernels/test_growing_layer.py::test_rows_follow_in_the_middle_of_steps": 4,
    "triton_kernels/test_growing_layer.py::test_steps_and_chunks_equal_extend": 4,
    "triton_kernels/test_growing_layer.py::test_tokens_are_taken_back_in_the_middle_of_steps": 3,
    "triton_kernels/test_importance.py::test_importance": 6,
    "triton_kernels/test_pool.py::test_chunks_give_what_one_call_gives": 3,
    "triton_kernels/test_pool.py::test_every_group_size": 5,
    "triton_kernels/test_pool.py::test_every_pair_of_poolings": 5,
    "triton_kernels/test_pool.py::test_every_width": 5,
    "triton_kernels/test_pool.py::test_every_window": 5,
    "triton_kernels/test_recall_step.py::test_every_step_against_the_definition": 3,
    "triton_kernels/test_recall_step.py::test_heads_share_a_choice": 2,
    "triton_kernels/test_recall_step.py::test_widths": 3,
    "triton_kernels/test_step.py::test_absorbed_latents_against_the_definition": 2,
    "triton_kernels/test_step.py::test_sixty_four_steps_against_the_definition": 6,
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cells", type=int, help="how many cells of every grid of parameters are not slow")


@pytest.hookimpl(tryfirst=True)  # before `-m` looks at marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark as slow what a grid has beyond its number of cells."""
    grids: dict[str, list[pytest.Item]] = {}
    for item in items:
        if hasattr(item, "callspec"):
            grids.setdefault(item.nodeid.partition("[")[0].removeprefix("tests/"), []).append(item)
    for name, cells in grids.items():
        most = min(DEAR.get(name, len(cells)), config.getoption("cells") or len(cells))
        for cell in by_news(cells)[most:]:
            cell.add_marker(pytest.mark.slow)


def by_news(cells: Sequence[pytest.Item]) -> list[pytest.Item]:
    """First the cells that have a value of a parameter which none before them has; in a mixed but fixed order."""
    seen: set[tuple[str, str]] = set()
    news, rest = [], []
    for cell in sorted(cells, key=lambda cell: hashlib.sha256(cell.nodeid.encode()).digest()):
        values = set()
        for name, value in cell.callspec.params.items():  # type: ignore[attr-defined]
            parts = value if isinstance(value, tuple) else (value,)
            values |= {(f"{name} {place}", repr(part)) for place, part in enumerate(parts)}
        (rest if values <= seen else news).append(cell)
        seen |= values
    return news + rest


PARAGRAPH = (
    "The harbour lay quiet under the moon, and 27 boats rocked at their moorings.\n"
    "“Who goes there?” cried the watchman;\tnobody answered him.\n\n"
    "In the year 1894 a letter came, written in a small careful hand.\n"
)


@pytest.fixture(scope="session")
def text() -> str:
    return "".join(f"Chapter {n}\n\n{PARAGRAPH}" for n in range(60))


@pytest.fixture(scope="session")
def text_file(text: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def tokenizer(text: str) -> PreTrainedTokenizerBase:
    return train_tokenizer([text], vocab_size=400)


@pytest.fixture(scope="session")
def corpus(text: str, tokenizer: PreTrainedTokenizerBase) -> Corpus:
    return encode_corpus([text], tokenizer)


@pytest.fixture(params=["reference", "torch", "torch-blocks"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each backend, and the torch backend with blocks so small that short sequences take many."""
    if request.param == "torch-blocks":
        monkeypatch.setattr(torch_attend, "_block_size", lambda device, ratio: 6)
    return request.param.removesuffix("-blocks")
