// kernels/ffn_glu.cu on a CPU (see cuda_on_cpu.h).
#include "cuda_on_cpu.h"

#include "kernel.inc"
extern "C" void run(const uint4* z, const uint4* dh, uint4* dz, uint2* values, u32* meta, const int* rows,
                    const long long* clocks, int F, int N) {
    launch(z, 0, dh, 0, 4, {(N + 255) / 256, F / 64, 1}, 1, 0,
           [=] { glu24_grad(z, dh, dz, values, meta, rows, rows + F, clocks, clocks + 4, F, N); });
}
