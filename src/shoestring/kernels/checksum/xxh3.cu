// xxh3 (64 bits, no seed) of a chunk in device memory, up to its eight accumulators; kernels/checksum/xxh3.py merges them.
//
// xxh3 adds 16 stripes of 64 bytes to eight accumulators, scrambles these, and goes on with the next 1,024 bytes. What a
// block adds does not depend on the accumulators: block_sums adds up all blocks in parallel, eight threads a block, and
// accumulate goes through the sums one after the other, eight threads a chunk.
//
// keys: 24 words of the secret, 8 words of it for the last stripe, the 8 first values of the accumulators.

INLINE u64 stripe_sum(u64 own, u64 neighbour, u64 key) {
    const u64 mixed = own ^ key;
    return neighbour + (mixed & 0xffffffffu) * (mixed >> 32);
}

extern "C" __global__ void block_sums(const u64* __restrict__ words, const u64* __restrict__ keys,
                                      u64* __restrict__ sums, int num_blocks) {
    const int at = blockIdx.x * THREADS + threadIdx.x;
    const int block = at / 8, lane = at % 8;
    if (block >= num_blocks) return;
    const u64* data = words + block * 128ll;
    u64 sum = 0;
#pragma unroll
    for (int s = 0; s < 16; ++s) sum += stripe_sum(data[s * 8 + lane], data[s * 8 + (lane ^ 1)], keys[s + lane]);
    sums[block * 8ll + lane] = sum;
}

INLINE u64 load_bytes(const unsigned char* p) {  // the last stripe begins anywhere
    u64 word = 0;
    for (int i = 0; i < 8; ++i) word |= (u64)p[i] << (8 * i);
    return word;
}

extern "C" __global__ void accumulate(const unsigned char* __restrict__ chunk, const u64* __restrict__ keys,
                                      const u64* __restrict__ sums, u64* __restrict__ accumulators, int num_bytes) {
    const int lane = threadIdx.x;
    if (lane >= 8) return;
    const int num_blocks = (num_bytes - 1) / 1024, num_stripes = (num_bytes - 1) % 1024 / 64;
    const u64 scramble = keys[16 + lane];
    u64 sum = keys[32 + lane];
#pragma unroll 16
    for (int b = 0; b < num_blocks; ++b) {
        sum += sums[b * 8ll + lane];
        sum = (sum ^ (sum >> 47) ^ scramble) * 0x9e3779b1u;
    }
    const u64* rest = (const u64*)chunk + num_blocks * 128ll;
    for (int s = 0; s < num_stripes; ++s)
        sum += stripe_sum(rest[s * 8 + lane], rest[s * 8 + (lane ^ 1)], keys[s + lane]);
    const unsigned char* last = chunk + num_bytes - 64;
    sum += stripe_sum(load_bytes(last + lane * 8), load_bytes(last + (lane ^ 1) * 8), keys[24 + lane]);
    accumulators[lane] = sum;
}
