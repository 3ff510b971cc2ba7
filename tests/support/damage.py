"""Small libraries that spoil a kernel of llama.cpp when they are preloaded, as a wrong build would (Linux)."""

from __future__ import annotations

import subprocess
from pathlib import Path

# symbol, what it returns, its parameters, their names
Q3_DOT = (
    "ggml_vec_dot_q3_K_q8_K",  # of few tokens; Q3_K has no other way for them on any processor
    "void",
    "int n, float *s, size_t bs, const void *x, size_t bx, const void *y, size_t by, int rows",
    "n, s, bs, x, bx, y, by, rows",
)
Q6_DOT = ("ggml_vec_dot_q6_K_q8_K", *Q3_DOT[1:])
Q4_GEMM = (  # of several tokens, on processors with AVX2
    "ggml_gemm_q4_0_8x8_q8_0",
    "void",
    "int n, float *s, size_t bs, const void *x, const void *y, int rows, int columns",
    "n, s, bs, x, y, rows, columns",
)
SGEMM = (  # of F16, and of Q8_0 where it is not repacked
    "llamafile_sgemm",
    "int",
    "void *p, long m, long n, long k, void *a, long la, void *b, long lb, float *c, long lc, int t, int u, int v",
    "p, m, n, k, a, la, b, lb, c, lc, t, u, v",
)

# name -> (the kernel, what it does instead; CALL is the right one)
KINDS = {
    "crash": (Q3_DOT, "*(volatile int *)0 = 1; CALL;"),
    "illegal": (Q3_DOT, "__builtin_trap(); CALL;"),
    "hang": (Q3_DOT, "for (;;) pause(); CALL;"),
    "Q3_K: every eighth product halved": (Q3_DOT, "CALL; static unsigned i; if (i++ % 8 == 0) *s *= 0.5f;"),
    "Q3_K: every product a tenth too large": (Q3_DOT, "CALL; *s *= 1.1f;"),
    "Q3_K: last block of a row lost": (Q3_DOT, "if (n > 256) n -= 256; CALL;"),
    "Q6_K: one product in 16 lost": (Q6_DOT, "CALL; static unsigned i; if (i++ % 16 == 0) *s = 0;"),
    "Q4_0: two of eight lanes swapped": (
        Q4_GEMM,
        "CALL; EACH(rows, columns, 8) SWAP(s[i * bs + j + 2], s[i * bs + j + 3])",
    ),
    "Q4_0: one of four rows stale": (
        Q4_GEMM,
        "CALL; EACH(rows, columns, 1) if (i % 4 == 3) s[i * bs + j] = s[i * bs - bs + j];",
    ),
    "F16, Q8_0: one of 16 lanes lost": (
        SGEMM,
        "int done = CALL; if (done) EACH(n, m, 16) c[i * lc + j] = 0; return done;",
    ),
}

SOURCE = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
#include <unistd.h>
#define SWAP(a, b) {{ float kept = a; a = b; b = kept; }}
#define EACH(rows, columns, step) for (int i = 0; i < rows; i++) for (int j = 0; j < columns; j += step)
{returns} {symbol}({parameters}) {{
    static {returns} (*right)({parameters});
    if (!right) right = dlsym(dlopen("libggml-cpu.so.0", RTLD_NOW | RTLD_NOLOAD), "{symbol}");
    {body}
}}
"""


def library(kind: str, folder: Path) -> Path:
    """The library that spoils what ``kind`` says, for LD_PRELOAD."""
    (symbol, returns, parameters, names), does = KINDS[kind]
    source = folder / f"{abs(hash(kind))}.c"
    made = source.with_suffix(".so")
    body = does.replace("CALL", f"right({names})")
    source.write_text(SOURCE.format(symbol=symbol, returns=returns, parameters=parameters, body=body))
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", made, source, "-ldl"], check=True)
    return made
