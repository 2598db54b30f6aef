// Enough of CUDA to run kernels/_cuda/row_attention.cu on a CPU: every thread of a cluster is a fiber, each block has shared
// memory of its own, filled with NaN. An asynchronous copy lands only when its thread waits for its group, and what is
// sent to another block lands only when the sender arrives at the cluster's barrier: a missing wait reads NaN.
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

using std::max;
using std::min;
struct uint4 { unsigned x, y, z, w; };
struct float4 { float x, y, z, w; };
#define ON_CPU
#define INLINE static inline
#define __device__
#define __global__
#define __restrict__
#define __launch_bounds__(...)

struct Copy { char* to; const char* from; bool zero; };
struct Sent { float* to; float value; };
struct Fiber {
    ucontext_t context;
    unsigned x, rank;
    bool done = false;
    std::vector<char> stack = std::vector<char>(64 * 1024);
    std::vector<std::vector<Copy>> groups;
    std::vector<Copy> open;
    std::vector<Sent> sent;
    long arrived = 0;
    float given;
};
static Fiber* current;
static std::vector<Fiber>* all;
static ucontext_t scheduler;
static struct { unsigned x, y, z; } blockIdx;
static unsigned num_ranks, shared_bytes;
static std::vector<std::vector<float>> memory;  // of each block
#define smem ((char*)memory[current->rank].data())
#define threadIdx (*current)

static void fail(const char* what) {
    printf("thread %d of block %d: %s\n", current->x, current->rank, what);
    exit(3);
}
static long warp_arrivals[8][4], block_arrivals[8], cluster_arrivals;
static void meet(long& arrivals, int size) {
    const long target = (arrivals++ / size + 1) * size;
    while (arrivals < target) swapcontext(&current->context, &scheduler);
}
static void __syncthreads() { meet(block_arrivals[current->rank], 128); }
static void copy_or_zero(void* to, const void* from, bool inside) {
    const char* p = (char*)to;
    if (p < smem || p + 16 > smem + shared_bytes || (p - smem) % 16 || (size_t)from % 16) fail("a copy that does not fit");
    current->open.push_back({(char*)to, (const char*)from, !inside});
}
static void commit() {
    current->groups.push_back(current->open);
    current->open.clear();
}
template <int n> static void wait_all_but() {
    auto& groups = current->groups;
    for (; (int)groups.size() > n; groups.erase(groups.begin()))
        for (auto& c : groups[0])
            if (c.zero) memset(c.to, 0, 16);
            else memcpy(c.to, c.from, 16);
}
static void launch_dependents() {}
static void grid_wait() {}
static unsigned short load_late(const unsigned short* p) { return *p; }
static unsigned cluster_rank() { return current->rank; }
static unsigned cluster_ranks() { return num_ranks; }
static void cluster_arrive() {
    for (auto& s : current->sent) *s.to = s.value;
    current->sent.clear();
    cluster_arrivals++, current->arrived++;
}
static void cluster_wait() {
    const long target = current->arrived * 128 * num_ranks;
    while (cluster_arrivals < target) swapcontext(&current->context, &scheduler);
}
static void send(float* to, unsigned rank, float value) {
    const long at = (char*)to - smem;
    if (rank >= num_ranks || at < 0 || at + 4 > shared_bytes) fail("sent to nowhere");
    float* there = (float*)((char*)memory[rank].data() + at);
    if (num_ranks > 1) current->sent.push_back({there, value});
    else *there = value;
}
static float other_lane(float v, int bit) {
    current->given = v;
    long& arrivals = warp_arrivals[current->rank][current->x / 32];
    meet(arrivals, 32);
    const float other = (*all)[current->rank * 128 + (current->x ^ bit)].given;
    meet(arrivals, 32);
    return other;
}
static float power2(float v) { return exp2f(v); }
static float root(float v) { return 1.f / sqrtf(v); }
static float widen(unsigned h) { unsigned u = h << 16; float f; memcpy(&f, &u, 4); return f; }
static unsigned short narrow(float f) {
    unsigned u;
    memcpy(&u, &f, 4);
    return (u + 0x7fff + (u >> 16 & 1)) >> 16;
}

#include "row_attention.cu"

static std::function<void()> body;
static void enter() {
    body();
    current->done = true;
    swapcontext(&current->context, &scheduler);
}
extern "C" void run(const u16* qkv, u16* keys, u16* values, const int* tables, const int* tiles, const float* turns,
                    const void* q_norm, const void* k_norm, u16* out, float eps, float scale, int table_stride, int groups,
                    int window, int num_tiles, int ranks, int shared) {
    num_ranks = ranks, shared_bytes = shared;
    body = [=] {
        row_attention(qkv, keys, values, tables, tiles, turns, q_norm, k_norm, out, eps, scale, table_stride, groups, window);
    };
    for (int z = 0; z < num_tiles; z++)
        for (int y = 0; y < groups; y++) {
            memory.assign(ranks, std::vector<float>(shared / 4 + 4, NAN));
            memset(warp_arrivals, 0, sizeof warp_arrivals), memset(block_arrivals, 0, sizeof block_arrivals);
            cluster_arrivals = 0;
            std::vector<Fiber> fibers(128 * ranks);
            all = &fibers;
            for (int i = 0; i < 128 * ranks; i++) {
                Fiber& f = fibers[i];
                f.x = i % 128, f.rank = i / 128;
                getcontext(&f.context);
                f.context.uc_stack.ss_sp = f.stack.data(), f.context.uc_stack.ss_size = f.stack.size();
                makecontext(&f.context, enter, 0);
            }
            for (bool more = true; more;) {
                more = false;
                for (auto& f : fibers)
                    if (!f.done) {
                        current = &f, more = true;
                        blockIdx = {f.rank, (unsigned)y, (unsigned)z};
                        swapcontext(&scheduler, &f.context);
                    }
            }
        }
}
