// kernels/comm/sparse_codes.cu on a CPU (see cuda_on_cpu.h).
#include "cuda_on_cpu.h"

static float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static u32 atomicAdd(u32* at, u32 value) { return (*at += value) - value; }
static u32 atomicOr(u32* at, u32 value) { return *at |= value; }
static int __popc(u32 v) { return __builtin_popcount(v); }
static int __ffs(u32 v) { return __builtin_ffs(v); }
static u32 __shfl_up_sync(u32, u32 v, int by) {
    const int lane = current->x % 32;
    return Exchange({v})(lane < by ? lane : lane - by);
}

#include "kernel.inc"
extern "C" void encode(const float* x, u16* values, short* places, float* error, int rows, int num, int k, int rank,
                       int shared) {
    launch(x, 0, x, 0, WARPS, {rows, 1, 1}, 1, shared, [=] { encode_top(x, values, places, error, num, k, rank); });
}
extern "C" void sum(const char* wire, long stride, int senders, long values_at, long places_at, float* out, int rows, int num,
                    int k) {
    launch(wire, 0, out, 0, WARPS, {rows, 1, 1}, 1, 0,
           [=] { sum_top((const unsigned char*)wire, stride, senders, values_at, places_at, out, num, k); });
}
