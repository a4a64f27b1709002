"""Measuring every layer under every candidate, handing out methods, and verifying what was chosen."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from condense.calibration.config import CalibrationConfig, barred, default_candidates
from condense.calibration.curve import NUM_POINTS, Curve, check_cache, choose, verify
from condense.calibration.measure import Meter
from condense.calibration.report import Calibration, LayerLoss, Mean, found_of
from condense.calibration.samples import draw_samples
from condense.methods import Dense
from condense.models import attention_layers, check_stock, chosen_methods, use
from condense.models.choice import REST
from condense.models.families import check_learned_positions, is_latent
from condense.models.inspect import inspect


def calibrate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    config: CalibrationConfig,
    *,
    measured: Path | None = None,
    on_estimate: Callable[[int], None] = lambda forwards: None,
    on_forward: Callable[[], None] = lambda: None,
) -> Calibration:
    """Find a method for every layer that keeps to a budget on these texts, or to a size of the cache.

    Each candidate is measured in each layer alone, all others dense, by the mean divergence of the model's predictions
    from the dense ones, with hidden numbers also of their answers. From the most faithful candidate everywhere, layers
    then get smaller ones, at the least loss per byte saved; for a given size of the cache, the candidates that lose
    least within it. Allocations on that path are measured whole, and the one that meets the goals is verified on other
    texts; if it fails there, the one before it is tried. The same arguments give the same allocation.

    model: a causal LM with stock attention, in evaluation mode, left as it was. texts: of documents like those that the
    model is to read. measured: a file that keeps what was measured, as it comes; an existing one is continued.
    on_estimate is called once, before the measurements, with the number of forwards of a text that they take; more are
    made only where several allocations that met the goals fail them on held-out texts. on_forward: after each forward.
    Raises ValueError for goals that cannot be met, saying what can be, for texts that are too short, for candidates
    that the model cannot take, and for a model that is condensed, in training mode or has offloaded weights.
    """
    check_stock(model)
    if model.training:
        raise ValueError("model must be in eval mode: call model.eval()")
    check_learned_positions(model.config, "length", config.length)
    check_learned_positions(model.config, "cache_length", config.counted_length)
    is_default = not config.candidates
    if is_default:
        latents = any(map(is_latent, attention_layers(model).values()))
        usual = default_candidates(config.length, latents=latents, host_memory=config.host_memory)
        config = replace(config, candidates=usual)
    reports = [inspect(model, {REST: method}, config.counted_length) for method in config.candidates]
    check_cache(reports, config)
    samples = draw_samples(tokenizer, texts, config)
    # made before the first forward, because it refuses models with offloaded weights
    meter = Meter(model, config.candidates, samples, measured, on_forward)
    layers = sorted(chosen_methods(model, config.candidates[0]))
    for method in config.candidates:
        try:  # a method that reads whole texts may refuse to have a cache in this model
            with torch.no_grad(), use(model, dict.fromkeys(layers, method)):
                model(input_ids=torch.zeros(1, 1, dtype=torch.int64, device=model.device), use_cache=True)
        except ValueError as error:
            raise ValueError(f"candidates: {method}: {error}") from error
    numbers = range(len(config.candidates))
    uniform = [dict.fromkeys(layers, n) for n in numbers]
    never = barred(layers) if is_default and not config.host_memory else set()
    never |= {(layer, n) for layer in layers for n in numbers if isinstance(config.candidates[n], Dense)}
    alone = [{layer: n} for layer in layers for n in numbers if (layer, n) not in never]

    forwards = sum(meter.missing(i, [{}, *uniform, *alone]) for i in meter.measured)
    # forwards still to come per text: the curve's grid, a bisection, two verifications, each with the dense model
    later = 1 + NUM_POINTS + 2 * len(alone).bit_length() + 4
    on_estimate(forwards + later * len(meter.measured))
    readings = [meter.read(i, [{}, *uniform, *alone]) for i in meter.measured]
    dense = [of_text[0] for of_text in readings]
    losses = []
    for k, allocation in enumerate(alone, 1 + len(uniform)):
        ((layer, number),), own = allocation.items(), [of_text[k] for of_text in readings]
        plain, asked = ([reading.kl for reading in own if bool(reading.right) is kind] for kind in (False, True))
        answers = Mean.of(asked) if asked else None
        losses.append(LayerLoss(layer, config.candidates[number], Mean.of(plain), answers, found_of(own, dense)))
    curve = Curve(meter, config, losses, reports)
    chosen = choose(curve, config)
    kept = verify(curve, config, chosen)
    points = tuple(curve.point(allocation, meter.measured) for allocation in uniform)
    measured_point, verified = curve.measured(kept), curve.verified(kept)
    return Calibration(config, tuple(losses), points, measured_point, verified, curve.points(), chosen - kept)
