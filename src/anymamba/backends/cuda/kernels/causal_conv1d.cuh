// What the kernels of the causal convolution share: which value a column has, and how a run of columns is read.
//
// Definitions: X (dtype of x, out, states), WIDTH (2 to 4). Column t of a row is x[t] for 0 <= t < seqlen, the initial states
// for -(WIDTH - 1) <= t < 0 (zero without them). With packed sequences (HAS_SEQ) column u reaches output t only if both belong
// to the same sequence, columns before the first belonging to that of column 0; outputs of negative sequences are 0.
#pragma once
#include "prelude.cuh"

#define BEFORE (WIDTH - 1)

// row[t0 .. t0 + N), `outside` where there is no column. One access of N elements where row and N allow it.
template <class Element, int N>
__device__ __forceinline__ Pack<Element, N> read_columns(const Element* row, i64 stride, int t0, int seqlen, Element outside) {
    const Element* first = row + (i64)t0 * stride;
    Pack<Element, N> pack;
    if (N * sizeof(Element) <= 16 && stride == 1 && t0 >= 0 && t0 + N <= seqlen &&
        (unsigned long long)first % (sizeof(Element) * N) == 0) {
        pack = load_pack<Element, N>(first);
    } else {
#pragma unroll
        for (int j = 0; j < N; ++j) {
            const bool inside = t0 + j >= 0 && t0 + j < seqlen;
            pack.at[j] = inside ? first[j * stride] : outside;
        }
    }
    return pack;
}

// The reverse; columns outside are not written.
template <class Element, int N>
__device__ __forceinline__ void write_columns(const Pack<Element, N>& pack, Element* row, i64 stride, int t0, int seqlen) {
    Element* first = row + (i64)t0 * stride;
    if (stride == 1 && t0 >= 0 && t0 + N <= seqlen && (unsigned long long)first % (sizeof(Element) * N) == 0) {
        store_pack<Element, N>(first, pack);
    } else {
#pragma unroll
        for (int j = 0; j < N; ++j)
            if (t0 + j >= 0 && t0 + j < seqlen) first[j * stride] = pack.at[j];
    }
}

// How many elements a row's start lies past a boundary of VEC elements: shifting the pieces back by it aligns all of them.
template <int VEC, class Element>
__device__ __forceinline__ int misalignment(const Element* row, i64 stride) {
    return stride == 1 ? (int)((unsigned long long)row / sizeof(Element) % VEC) : 0;
}
