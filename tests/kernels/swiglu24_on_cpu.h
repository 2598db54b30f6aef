// kernels/_cuda/swiglu24.cu on a CPU (see cuda_on_cpu.h), bf16.
#include <cmath>

#include "cuda_on_cpu.h"

#define INLINE static inline
static float widen(u32 h) { return wide(h); }
static float widen_high(u32 pair) { return wide(pair >> 16); }
static u32 narrow2(float low, float high) { return narrow(low) | (u32)narrow(high) << 16; }
static float low_of(float a, float b) { return a != a || b != b ? NAN : min(a, b); }
static float high_of(float a, float b) { return a != a || b != b ? NAN : max(a, b); }
static float power2(float v) { return exp2f(v); }
static float inverse(float v) { return 1.f / v; }
static u32 given_word[64][32];
static u32 __shfl_xor_sync(u32, u32 x, int by) {
    const int warp = current->x / 32, lane = current->x % 32;
    given_word[warp][lane] = x;
    __syncwarp();
    const u32 other = given_word[warp][lane ^ by];
    __syncwarp();
    return other;
}

#include "kernel.inc"
extern "C" void run(const uint4* z, const uint4* dh, uint4* dz, uint2* values, u32* meta, const int* rows,
                    const long long* clocks, int F, int N) {
    launch(z, 0, dh, 0, 4, {(N + 255) / 256, F / 64, 1}, 0,
           [=] { swiglu24_grad(z, dh, dz, values, meta, rows, rows + F, clocks, clocks + 4, F, N); });
}
