"""Shared by several folders: a small text, its tokenizer and corpus, the backends, and which cells run when. Imports of
torch stand inside functions: the process that hands tests to two others reads this file before it starts them.
"""

from __future__ import annotations

import gc
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from grids import covering

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedTokenizerBase

    from condense.tasks import Corpus

# Cells per grid that takes long in `make test`, chosen by `grids.covering`; at night and on a GPU all run.
DEAR = {
    "benchmarks/test_transfer.py": {"each_make_learns_from_the_first_steps": 2,
        "what_follows_a_prompt_is_read_as_steps_read_it": 3},
    "caches/test_cache_bytes.py": {"bytes_after_prefill_and_decode": 3},
    "caches/test_condensed_layer.py": {"crop_is_exact_for_every_count_at_every_boundary": 7, "rows_follow": 36},
    "caches/test_recall_store.py": {"rows_and_copies": 4, "there_are_no_more_slots_than_room_for_groups": 4},
    "caches/test_static_layer.py": {"many_steps_and_chunks_equal_the_growing_layer": 6,
        "prompts_of_any_length_follow_one_another_at_the_same_addresses": 3, "reorder_is_in_place": 16,
        "steps_are_one_graph_and_the_host_does_not_trust_its_count_once_they_are_recorded": 3},
    "methods/test_laws.py": {"a_changed_token_leaves_earlier_outputs_bit_equal": 64},
    "methods/test_parity.py": {"extend_any_chunks_equal_one_call": 48},
    "methods/test_two_scales.py": {"attention": 9, "models_keep_their_laws": 3},
    "models/test_fused.py": {"generate_reads_long_prompts_so_where_it_replays_steps": 2,
        "prompts_compute_the_same_and_short_ones_stay_as_they_are": 2, "steps_compute_the_same": 2},
    "models/test_generate.py": {"a_conversation_of_a_batch_with_ragged_second_turns": 6,
        "a_decoder_gives_the_tokens_of_generate_prompt_after_prompt": 3},
    "models/test_gradients.py": {"packed_documents_train_as_separate_ones": 16},
    "models/test_laws.py": {"defaults_of_device_and_dtype_change_nothing": 10,
        "each_row_of_a_padded_batch_gets_its_own_tokens": 10, "full_forward_chunks_and_steps_agree": 34,
        "static_and_growing_caches_give_the_tokens_of_none": 16,
        "whole_prompts_with_and_without_a_cache_are_followed_by_steps_of_any_size": 15},
    "models/test_replay.py": {"tokens_are_those_of_the_growing_cache": 5},
    "models/test_reread.py": {"padded_rows_are_those_alone": 4},
    "ops/test_error_budget.py": {"output_within_twice_the_eager_error": 16},
    "ops/test_hopper_compiles.py": {"a_step_on_two_scales_compiles": 1, "a_store_is_unpacked_in_whole_words": 3,
        "groups_of_odd_widths_close": 2, "slots_over_pages_compile": 1, "steps_by_lanes": 3, "steps_on_latents": 2,
        "sums_of_values_stay_in_registers": 3, "the_index_is_multiplied_in_halves": 1,
        "the_pooled_step_over_pages_compiles": 2, "two_part_keys_fit_into_shared_memory": 1},
    "ops/test_step.py": {"entries_are_those_of_the_growing_path_to_the_bit": 24, "rows_that_are_not_real": 16,
        "tokens_are_taken_back_from_larger_rings": 12},
    "serving/test_paged.py": {"a_prefix_that_a_single_token_completes_in_the_same_step": 50,
        "a_shared_prefix_is_exact_and_never_written": 40, "equal_to_the_whole": 60,
        "heads_on_two_ranks_weigh_and_choose_groups_together": 9, "later_pieces_at_every_boundary": 18,
        "many_requests_at_different_lengths": 40, "prefixes_of_prefixes_that_are_written_in_the_same_step": 40,
        "several_calls_in_a_step": 40, "what_a_model_adds_to_attention": 20},
    "serving/test_paged_recall.py": {"records_and_sums_do_not_depend_on_how_tokens_come": 10,
        "records_have_the_bits_of_steps_in_buffers": 12},
    "test_functional.py": {"every_plan_and_length": 120, "left_padding": 40},
    "train/test_adapt.py": {"adapters_resume_load_condensed_and_merge": 1},
    "train/test_training.py": {"a_resumed_run_equals_an_uninterrupted_one_and_logs_its_rate": 1},
    "triton_kernels/test_attend.py": {"any_number_of_sources_within_budget": 1, "entries_ahead_of_the_rules_own": 1,
        "is_one_well_formed_operation": 1, "output_lse_and_gradients_within_budget": 6},
    "triton_kernels/test_entry_bits.py": {"steps": 5},
    "triton_kernels/test_extras.py": {"documents_within_budget": 4, "steps_and_prompts": 3},
    "triton_kernels/test_growing.py": {"a_copy_goes_its_own_way": 1, "a_step_allocates_and_starts_kernels": 6,
        "room_to_spare_is_bounded": 1, "rows_follow_in_the_middle_of_steps": 3, "steps_and_chunks_equal_extend": 3,
        "steps_are_the_bits_of_operations": 2, "tokens_are_taken_back_in_the_middle_of_steps": 2,
        "tokens_are_those_of_extend": 1},
    "triton_kernels/test_hopper_prompts.py": {"attention_is_the_definitions": 5, "open_groups_are_read": 4},
    "triton_kernels/test_paged_step.py": {"a_prefix_that_a_single_token_completes_in_the_same_step": 4,
        "latents_whose_heads_are_spread_over_ranks": 2, "open_groups_that_another_kernel_reads": 1,
        "prompts_that_share_a_call": 2, "requests_of_all_lengths_where_each_has_room_for_many_groups": 1,
        "requests_that_attend_one_part_after_another": 1, "slots_of_pages_that_change_hands": 1,
        "steps_are_those_of_pytorch": 5, "steps_are_within_the_budget": 11, "steps_by_lanes": 2,
        "tokens_in_host_memory_are_those_of_the_device": 2, "what_a_model_adds_to_attention": 2},
    "triton_kernels/test_pool.py": {"chunks_give_what_one_call_gives": 3, "pooling": 18, "summaries": 11},
    "triton_kernels/test_recall_prefill.py": {"choice_output_and_gradients": 3, "choices_for_others": 8,
        "compiled_as_one_graph": 1, "scores_are_the_definitions_to_the_bit": 5, "weights_are_the_definitions": 3},
    "triton_kernels/test_recall_step.py": {"a_store_is_unpacked": 6, "every_step_against_the_definition": 7,
        "lanes_are_within_the_error_budget": 2, "latents": 1, "latents_that_no_other_kernel_reads": 1,
        "open_groups_that_another_kernel_reads": 2, "outputs_are_within_the_error_budget": 3, "slots": 2,
        "stores_in_fewer_bits": 2, "sums_of_16_bits_are_those_of_pytorch_to_the_bit": 2,
        "the_index_is_the_definition_to_the_bit": 4},
    "triton_kernels/test_running_sums.py": {"sums_of_16_bits_are_those_of_pytorch_to_the_bit": 10},
    "triton_kernels/test_step.py": {"a_window_longer_than_any_text": 1, "absorbed_latents_against_the_definition": 4,
        "entries_on_two_scales": 2, "every_step_against_the_definition": 8,
        "goes_on_from_a_prefill_as_the_reference_does": 2,
        "goes_on_from_prompts_of_different_lengths_as_the_reference_does": 1, "output_within_budget": 3,
        "rows_that_come_and_go": 1},
}  # fmt: skip
# runs over every model once, however few cells `--cells` asks for: with each version of transformers
EACH_MODEL = {"models/test_laws.py::test_full_forward_chunks_and_steps_agree"}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cells", type=int, help="how many cells of every grid of parameters are not slow")


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Kernels need a GPU or, in a process of their own, Triton's interpreter; some a GPU of one kind."""
    tests, places = Path(__file__).parent, (collection_path, *collection_path.parents)
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if tests / "gpu" in places or (tests / "triton_kernels" in places and not interpreted):
        import torch

        if not torch.cuda.is_available():
            return True
        names = ("gpu/test_hopper.py", "gpu/test_recall_hopper.py", "triton_kernels/test_hopper_prompts.py")
        hopper = {tests / name for name in names}
        if collection_path in hopper and torch.cuda.get_device_capability() != (9, 0):
            return True
    return None


def pytest_collection_finish() -> None:
    """Objects that exist now stay: later searches for garbage need not look at them."""
    gc.freeze()


@pytest.hookimpl(tryfirst=True)  # before `-m` looks at marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark as slow what a grid has beyond its number of cells."""
    grids: dict[str, list[pytest.Item]] = {}
    for item in items:
        if hasattr(item, "callspec"):
            grids.setdefault(item.nodeid.partition("[")[0].removeprefix("tests/"), []).append(item)
    for name, cells in grids.items():
        path, _, test = name.partition("::test_")
        values, asked = list(map(_values, cells)), config.getoption("cells") or len(cells)
        if name in EACH_MODEL and asked < len(cells):
            values = [{x for x in each if x[0] == "model 0"} for each in values]
            asked = len(set().union(*values))
        most = min(DEAR.get(path, {}).get(test, len(cells)), asked)
        if most < len(cells):
            kept = set(covering([cell.nodeid for cell in cells], values, most))
            for i, cell in enumerate(cells):
                if i not in kept:
                    cell.add_marker(pytest.mark.slow)


def _values(cell: pytest.Item) -> set[tuple[str, str]]:
    found = set()
    for name, value in cell.callspec.params.items():  # type: ignore[attr-defined]
        parts = value if isinstance(value, tuple) else (value,)
        places = value.items() if isinstance(value, dict) else enumerate(parts)
        found |= {(f"{name} {place}", repr(part)) for place, part in places}
    return found


PARAGRAPH = (
    "The harbour lay quiet under the moon, and 27 boats rocked at their moorings.\n"
    "“Who goes there?” cried the watchman;\tnobody answered him.\n\n"
    "In the year 1894 a letter came, written in a small careful hand.\n"
)


def pytest_configure() -> None:
    # tests pool random models on purpose; the test of the line that says so asks for it
    logging.getLogger("condense.models.adapted").setLevel(logging.ERROR)


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
    from condense.train import train_tokenizer

    return train_tokenizer([text], vocab_size=400)


@pytest.fixture(scope="session")
def corpus(text: str, tokenizer: PreTrainedTokenizerBase) -> Corpus:
    from condense.tasks import encode_corpus

    return encode_corpus([text], tokenizer)


@pytest.fixture(scope="session", autouse=True)
def encoded_once() -> Iterator[None]:
    """Thousands of texts together, the names and numbers of every training run, are encoded once by each vocabulary."""
    from transformers import PreTrainedTokenizerBase

    known, encode = {}, PreTrainedTokenizerBase.__call__

    def call(tokenizer, *texts, **options):  # type: ignore[no-untyped-def]
        if len(texts) != 1 or not isinstance(texts[0], list) or len(texts[0]) < 1000:
            return encode(tokenizer, *texts, **options)
        key = tokenizer.backend_tokenizer.to_str(), *texts[0], *options.items()
        if key not in known:
            known[key] = encode(tokenizer, *texts, **options)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PreTrainedTokenizerBase, "__call__", call)
        yield


@pytest.fixture
def expanded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    from condense.latent import UpProjection

    counts, expand = [], UpProjection.expand
    monkeypatch.setattr(UpProjection, "expand", lambda up, x: counts.append(x.shape[2]) or expand(up, x))
    return counts


@pytest.fixture(params=["reference", "torch", "torch-blocks"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each backend, and the torch backend with blocks so small that short sequences take many."""
    from condense.ops.torch import attend, pool

    if request.param == "torch-blocks":
        monkeypatch.setattr(attend, "_block_size", lambda device, ratio: 6)
        monkeypatch.setattr(attend, "_RECALL_BLOCK", 16)
        monkeypatch.setattr(pool, "_BLOCK", 1000)
    return request.param.removesuffix("-blocks")
