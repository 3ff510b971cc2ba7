"""llama.cpp's other names for our options, and advice for options that only llama.cpp has. Source: common/arg.cpp."""

from __future__ import annotations

ALIASES = {  # llama.cpp's name: our flag with the same meaning
    "-hfr": "-hf",
    "-hfrd": "-hfd",
    "--spec-draft-hf": "-hfd",
    "--spec-draft-model": "-md",
    "--n-predict": "-n",
    "--n-gpu-layers": "-ngl",
    "--n-gpu-layers-draft": "-ngld",
    "--spec-draft-ngl": "-ngld",
    "-ncmoe": "--n-cpu-moe",
    "-ncffn": "--n-cpu-ffn",
    "--spec-draft-type-k": "-ctkd",
    "--spec-draft-type-v": "-ctvd",
    "--draft": "--draft-max",
    "--draft-n": "--draft-max",
    "--draft-n-max": "--draft-max",
    "--spec-draft-n-max": "--draft-max",
    "--temperature": "--temp",
    "-sys": "--system",
    "--system-prompt": "--system",
    "-sysf": "--system-file",
    "--system-prompt-file": "--system-file",
    "--reverse-prompt": "--stop",
    "--chat-template-file": "--chat-template",
}

_ADVICE = {  # advice: llama.cpp's names
    "use -lm none": "--no-mmap",
    "use -lm mmap": "--mmap",
    "use -lm mlock": "--mlock",
    "use -lm dio": "-dio --direct-io",
    "use -ub N": "-b --batch-size",
    "use -t N, for prompts and answers": "-tb --threads-batch -td --threads-draft -tbd --threads-batch-draft",
    "use -c N: the draft's context is the target's": "-cd --ctx-size-draft",
    "use --n-cpu-moe 999": "-cmoe --cpu-moe",
    "use -ts N,N for each GPU's share, or CUDA_VISIBLE_DEVICES=0 for one GPU": "-sm --split-mode -mg --main-gpu -dev "
    "--device -devd --device-draft",
    "use --headroom SIZE": "-fitt --fit-target",
    "leave it out: layers are fitted to the GPU unless -ngl is given": "-fit --fit -fitc --fit-ctx",
    "use -ctk q8_0 -ctv q8_0 for a smaller KV cache, or -ngl N for fewer layers": "-nkvo --no-kv-offload",
    "use --draft-policy: drafting is adaptive, and stops where it does not pay": "--draft-min --draft-n-min "
    "--spec-draft-n-min --draft-p-min --spec-draft-p-min --draft-p-split --spec-draft-p-split",
    "use --drafter draft, lookup, mtp or eagle3": "--spec-type --spec-default --mtp --eagle3",
    "use --lookup-corpus FILE": "-lcs --lookup-cache-static -lcd --lookup-cache-dynamic",
    "use --stop TEXT": "-r",
    "use -hf USER/REPO/FILE.gguf": "-hff --hf-file",
    "use -hf USER/REPO:QUANT": "-mu --model-url -dr --docker-repo",
    "set HF_TOKEN": "-hft --hf-token",
    "set HF_HUB_OFFLINE=1": "--offline",
    "use ggufspec chat, which is a conversation": "-cnv --conversation -i --interactive -if --interactive-first "
    "-mli --multiline-input",
    "use ggufspec run": "-st --single-turn",
    "use ggufspec run --raw": "-no-cnv --no-conversation",
    "leave it out: the model's chat template is used; --raw continues plain text": "--jinja",
    "use --raw": "--no-jinja",
    "use -rea off": "--reasoning-budget",
    "use -f FILE, or -p $'one\\ntwo'": "-e --escape",
    "leave it out: only the answer goes to standard output": "--no-display-prompt --simple-io --log-disable",
    "leave it out; NO_COLOR=1 turns colours off": "-co --color --log-colors",
    "use -v": "-lv --verbosity --log-verbosity --verbose-prompt --perf --show-timings",
    "leave it out": "--no-warmup -cb --cont-batching -kvu --kv-unified --context-shift --cache-prompt --metrics",
    "use --temp, --top-k, --top-p, --min-p and penalties": "--samplers --sampler-seq --sampling-seq --mirostat "
    "--typical --typical-p --top-nsigma --top-n-sigma --xtc-probability --dry-multiplier --dynatemp-range",
    "use ggufspec doctor": "--list-devices",
    "use ggufspec models": "-cl --cache-list",
}
ADVICE = {name: advice for advice, names in _ADVICE.items() for name in names.split()}
