// What the norms share: a row (or a group of its columns) belongs to LANES threads, which keep it in registers.
//
// Macros    V elements are moved by one access where everything is aligned (16 bytes of x), else V = 1. A thread has PACKS
//           times V columns: those at (j * LANES + lane) * V. A block has UNITS rows of LANES threads each; UNITS > 1 only
//           where LANES is a warp, so that no barrier is met by a part of a block's rows.
#pragma once
#include "prelude.cuh"

#define THREADS (LANES * UNITS)
#define WARPS (LANES / 32)

// V elements as floats, in accesses of 16 bytes at most.
template <class Element>
__device__ __forceinline__ void load_floats(float (&to)[V], const Element* from) {
    constexpr int STEP = V * (int)sizeof(Element) <= 16 ? V : 16 / (int)sizeof(Element);
#pragma unroll
    for (int i = 0; i < V; i += STEP) {
        float some[STEP];
        to_floats(some, load_pack<Element, STEP>(from + i));
#pragma unroll
        for (int k = 0; k < STEP; ++k) to[i + k] = some[k];
    }
}

template <class Element>
__device__ __forceinline__ void store_floats(Element* to, const float (&from)[V]) {
    constexpr int STEP = V * (int)sizeof(Element) <= 16 ? V : 16 / (int)sizeof(Element);
#pragma unroll
    for (int i = 0; i < V; i += STEP) {
        float some[STEP];
#pragma unroll
        for (int k = 0; k < STEP; ++k) some[k] = from[i + k];
        Pack<Element, STEP> pack;
        from_floats(pack, some);
        store_pack<Element, STEP>(to + i, pack);
    }
}

// COUNT sums over the LANES threads of a row, in a fixed order; every thread gets them. `shared` is the block's, of
// 2 * WARPS * COUNT floats; `turn` alternates between its halves, so that one barrier a sum is enough.
template <int COUNT>
__device__ __forceinline__ void sum_over_row(float (&x)[COUNT], float* shared, int& turn) {
#pragma unroll
    for (int c = 0; c < COUNT; ++c) x[c] = sum_over_lanes<32>(x[c]);
#if WARPS > 1
    float* half = shared + turn * WARPS * COUNT;
    turn ^= 1;
    if (threadIdx.x % 32 == 0) {
#pragma unroll
        for (int c = 0; c < COUNT; ++c) half[c * WARPS + threadIdx.x / 32] = x[c];
    }
    __syncthreads();
#pragma unroll
    for (int c = 0; c < COUNT; ++c) {
        x[c] = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) x[c] += half[c * WARPS + w];
    }
#endif
}

// Scales what dropout keeps and zeroes the rest, also what is infinite. `keep` holds V bytes of 0 or 1.
__device__ __forceinline__ void drop(float (&x)[V], const unsigned char* keep, float scale) {
    const Pack<unsigned char, V> kept = load_pack<unsigned char, V>(keep);
#pragma unroll
    for (int i = 0; i < V; ++i) x[i] = kept.at[i] ? x[i] * scale : 0.0f;
}
