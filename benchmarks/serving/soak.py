"""Mixed requests at a small model in vLLM for a while: no wrong answer, no lost page, no memory that grows.

    python benchmarks/serving/soak.py OUT.json --seconds 1800 \\
        --method recall:window=64,num_recall=8,store=host,store_bits=8
    python benchmarks/serving/soak.py OUT.json --seconds 500 --method recall:store_bits=8 --longest 131072 \\
        --blocks 3600 --mode graph --adapter --dtype float16    # on a GPU

Requests arrive in bursts, with answers of 1 to 48 tokens; some are given up on the way. Half are prompts of 1 to 1,200
tokens (or --longest), short ones most often; the others ask something on the first tokens of one of two texts. With
--adapter, forty requests for the model and forty for it with a random LoRA adapter take turns (on a CPU vLLM confuses
the two within one batch). The pool of blocks holds a few of the longest, so that some are put back. Every tenth answer
is compared with `generate` of the same model in float32, and so is what `generate` answers once all weights have moved
by 3e-7 of their size: where a store has 8 or 4 bits, float32's own noise changes some answers. In another --dtype,
which vLLM's adapters need on a GPU, noise is what `generate` answers in that dtype. A method that reads prompts
otherwise than single tokens may part from `generate` after a request was put back: take prompt=recall. Ends with an
error if far more answers of vLLM differ than noise changes, or if blocks are missing once all requests are done.

The memory of the process is noted four times, after what is free went back to the system. On a CPU, PyTorch's library
of kernels (oneDNN) would keep one for every number of tokens that it meets, up to 1,024: here it keeps one.
"""

import argparse
import copy
import ctypes
import os
import random
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] = "1"

import psutil
import torch
from correct import DEVICE, RANK, load, make_adapter, wide
from engine import VLLM, Engine, mode_settings
from vllm import SamplingParams
from vllm.lora.request import LoRARequest

import condense
from condense.results import write_results

ANSWER, TEXTS, QUESTION, CHECKED, TURN = 48, 2, 32, 10, 40


class Traffic:
    """Requests at random, and what became of them.

    models: those whose `generate` is right, by the adapter that vLLM is asked for, or None. dtype: of vLLM's numbers.
    """

    def __init__(self, engine, models, seed, longest, dtype):
        self.engine, self.random, self.longest = engine, random.Random(seed), longest
        noisy = moved if dtype == torch.float32 else lambda model: copy.deepcopy(model).to(dtype)
        self.models = [(adapter, model, noisy(model)) for adapter, model in models.items()]
        self.vocabulary = self.models[0][1].config.vocab_size
        self.texts = [self.tokens(longest) for _ in range(TEXTS)]
        self.prompts = {}
        self.found = {
            "requests": 0,
            "given_up": 0,
            "cached_tokens": 0,
            "checked": 0,
            "differ": 0,
            "changed_by_noise": 0,
        }

    def tokens(self, count):
        return [self.random.randrange(self.vocabulary) for _ in range(count)]

    def arrive(self):
        """A burst of one to six requests, all of one turn; none while requests for another model run."""
        turn, more = divmod(self.found["requests"], TURN)
        if len(self.models) > 1 and any(int(name) // TURN != turn for name in self.prompts):
            return
        for _ in range(min(self.random.randint(1, 6), TURN - more)):
            if self.random.random() < 0.5:
                ids = self.tokens(int(self.longest ** self.random.random()))
            else:
                read = self.random.randrange(self.longest - QUESTION)
                ids = self.random.choice(self.texts)[:read] + self.tokens(QUESTION)
            name, count = str(self.found["requests"]), self.random.randint(1, ANSWER)
            params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
            adapter = self.models_of(name)[0]
            self.engine.engine.add_request(name, {"prompt_token_ids": ids}, params, lora_request=adapter)
            self.prompts[name] = ids, count
            self.found["requests"] += 1

    def models_of(self, name):
        """The adapter of a request, its model and that model moved."""
        return self.models[int(name) // TURN % len(self.models)]

    def give_up(self):
        name = self.random.choice([*self.prompts])
        self.engine.engine.abort_request([name])
        del self.prompts[name]
        self.found["given_up"] += 1

    def step(self):
        for output in self.engine.engine.step():
            if output.finished and output.request_id in self.prompts:
                ids, count = self.prompts.pop(output.request_id)
                self.found["cached_tokens"] += output.num_cached_tokens or 0
                if int(output.request_id) % CHECKED == 0:
                    self.check(self.models_of(output.request_id)[1:], ids, list(output.outputs[0].token_ids), count)

    def check(self, models, ids, answer, count):
        row = torch.tensor([ids], device=DEVICE)
        fixed = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": count}
        fixed["attention_mask"] = torch.ones_like(row)
        want, noisy = (x.generate(row, **fixed)[0, len(ids) :].tolist() for x in models)
        self.found["checked"] += 1
        self.found["differ"] += answer != want
        self.found["changed_by_noise"] += noisy != want


@torch.no_grad()
def moved(model):
    """A copy of a model whose weights differ by 3e-7 of their size."""
    other, generator = copy.deepcopy(model), torch.Generator().manual_seed(0)
    for x in other.parameters():
        x.mul_(1 + 3e-7 * torch.randn(x.shape, generator=generator).to(x.device))
    return other


def run(args):
    """Requests for so many seconds, then none until all are done."""
    model = condense.apply(wide()[0], args.method)
    with tempfile.TemporaryDirectory() as folder:
        model.config.max_position_embeddings = args.longest + ANSWER
        model.save_pretrained(folder)
        models, settings = {None: model.to(DEVICE)}, mode_settings(args.mode)
        if args.adapter:
            adapter = make_adapter(model)
            models[LoRARequest("adapter", 1, adapter)] = load(folder, adapter, DEVICE)
            settings |= {"enable_lora": True, "max_lora_rank": RANK}
        engine = Engine(
            folder, dtype=args.dtype, max_model_len=args.longest + ANSWER, max_num_seqs=16,
            max_num_batched_tokens=max(512, args.longest // 32), num_gpu_blocks_override=args.blocks,
            enable_prefix_caching=True, kv_cache_memory_bytes=1 << 30, gpu_memory_utilization=0.02,
            **settings,
        )  # fmt: skip
        traffic = Traffic(engine, models, args.seed, args.longest, getattr(torch, args.dtype))
        began, memory = time.time(), []
        while (passed := time.time() - began) < args.seconds or traffic.prompts:
            if passed < args.seconds and len(traffic.prompts) < 24 and traffic.random.random() < 0.2:
                traffic.arrive()
            if traffic.prompts and traffic.random.random() < 0.005:
                traffic.give_up()
            traffic.step()
            if passed > args.seconds * (len(memory) + 1) / 4 and len(memory) < 4:
                ctypes.CDLL("libc.so.6").malloc_trim(0)
                memory.append(psutil.Process().memory_info().rss)
        engine.scheduler.reset_prefix_cache()
        total, free = engine.pages
    return {
        "vllm": VLLM, "method": str(args.method), "mode": args.mode, "dtype": args.dtype, "adapter": args.adapter,
        "seconds": round(time.time() - began), "longest": args.longest, "pages": total, "free_pages": free,
        "preempted": engine.preempted, **traffic.found, "memory_bytes": memory,
    }  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--method", required=True, type=condense.Method.parse)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--blocks", type=int, default=60, help="blocks of the pool")
    parser.add_argument("--longest", type=int, default=1200, help="tokens of the longest prompt")
    parser.add_argument("--adapter", action="store_true", help="every other turn with a LoRA adapter")
    parser.add_argument("--dtype", choices=["float32", "float16", "bfloat16"], default="float32")
    parser.add_argument("--mode", choices=["default", "graph", "eager"], default="eager")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    result = run(args)
    write_results(args.out, result, seed=args.seed)
    print(result)
    if result["differ"] > 2 * result["changed_by_noise"] + 3 or result["free_pages"] != result["pages"]:
        sys.exit("soak: answers are wrong, or blocks are missing")


if __name__ == "__main__":
    main()
