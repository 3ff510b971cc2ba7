// Forced into every C++ file of llama.cpp (-include) by scripts/bootstrap --cpu tile-load.
//
// Some versions of GCC tell their optimiser that _tile_loadconfig reads 8 bytes. It reads 64; the stores to the other
// 56 are removed as dead, and ldtilecfg faults on what happens to be there (ggml_tile_config_init in
// ggml/src/ggml-cpu/amx/mmq.cpp). Here the operand is all 64 bytes. Without AMX nothing of this has an effect.
#pragma once
#if defined(__AMX_TILE__)
#include <immintrin.h>
static inline __attribute__((always_inline)) void ggufspec_tile_loadconfig(const void *config) {
    struct tile_config {
        char bytes[64];
    };
    __asm__ volatile("ldtilecfg %0" : : "m"(*static_cast<const tile_config *>(config)) : "memory");
}
#define _tile_loadconfig(config) ggufspec_tile_loadconfig(config)
#endif
