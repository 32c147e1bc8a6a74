// Matrix products of one warp: fragments of 16 x 16 elements, loaded from shared memory, multiplied on the tensor cores.
//
// A Fragment<X> is a 16 x 16 matrix F spread over the 32 lanes; X is f16, bf16 or f32. With g = lane / 4 and t = lane % 4,
//
//     at[0] = F[g    ][2t, 2t + 1]        at[2] = F[g    ][2t + 8, 2t + 9]
//     at[1] = F[g + 8][2t, 2t + 1]        at[3] = F[g + 8][2t + 8, 2t + 9]
//
// each a pair of neighbours in a row: 32 bits for 16-bit elements, two floats for f32. Sums are Sums = float[2][4]:
//
//     sums[h][0, 1] = S[g][8h + 2t, 8h + 2t + 1]        sums[h][2, 3] = S[g + 8][8h + 2t, 8h + 2t + 1]
//
// so sums become the left operand of a next product without leaving their lanes (`rounded`). One operation multiplies:
//
//     multiply_add<once>(sums, a, b):  S += A * B^T (rows of A) . (rows of B), over 16 elements: k is along a row of both
//
// `load_rows` gives the tile that is stored, `load_columns` its transpose; either serves as left or right operand. Example:
// C (16 x k) times B^T with B (16 x k), both stored with k along rows: load_rows for both. A product P * X with X stored (k, n):
// load_columns of X's tile, which is X^T with k along its rows.
//
// What runs: f16, bf16: mma.m16n8k16 from sm_80 on; f16 on sm_75 two mma.m16n8k8. f32: mma.m16n8k8 in tf32 from sm_80 on, either
// once (operands rounded to 11 bits) or three times with operands split into a high and a low part (error about
// 1e-6 instead of 5e-4). Everything else: shuffles and fused multiply-adds in float, right but slow.
// ldmatrix needs every row of a tile aligned to 16 bytes; strides (elements from row to row) with stride * sizeof(X) = 16 modulo 32
// (16-bit: odd multiples of 16 bytes; f32: 8 modulo 32 elements) have no bank conflicts: see `padded_stride`.
//
// Shared memory is addressed by 32-bit numbers here (`shared_address`), as ldmatrix and cp.async want it.
#pragma once
#include "prelude.cuh"

#ifndef ANYMAMBA_EMULATED
struct Float2 {
    float x, y;
};
#else
typedef float2 Float2;
#endif

template <class X>
struct PairOf {
    typedef unsigned type;
};
template <>
struct PairOf<float> {
    typedef Float2 type;
};

template <class X>
struct Fragment {
    typename PairOf<X>::type at[4];
};

// The same matrix for the right operand: the instruction wants the two pairs of a row side by side, so at[1] and at[2] trade
// places. A Fragment serves as right operand too, at the price of two moves a product.
template <class X>
struct Right {
    typename PairOf<X>::type at[4];
};
template <class X>
__device__ __forceinline__ Right<X> as_right(const Fragment<X>& f) {
    return {{f.at[0], f.at[2], f.at[1], f.at[3]}};
}

// Elements from row to row of a tile in shared memory with `columns` (a multiple of 16) columns: no bank conflicts.
template <class X>
constexpr int padded_stride(int columns) {
    return sizeof(X) == 2 ? (columns % 16 ? columns : columns + 8) : (columns / 32 * 32 + (columns % 32 > 8 ? 40 : 8));
}

// --- pairs

__device__ __forceinline__ Float2 pair_to_floats(const bf16*, unsigned pair) {
    return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)};
}
__device__ __forceinline__ Float2 pair_to_floats(const f16*, unsigned pair) {
    f16 low, high;
    low.bits = (unsigned short)pair;
    high.bits = (unsigned short)(pair >> 16);
    return {to_float(low), to_float(high)};
}
__device__ __forceinline__ Float2 pair_to_floats(const float*, Float2 pair) { return pair; }

template <class X>
__device__ __forceinline__ typename PairOf<X>::type pair_of(float low, float high) {
    Pack<X, 2> pack;
    const float values[2] = {low, high};
    from_floats(pack, values);
    return (unsigned)pack.at[0].bits | (unsigned)pack.at[1].bits << 16;
}
template <>
__device__ __forceinline__ Float2 pair_of<float>(float low, float high) {
    return {low, high};
}
#if !defined(ANYMAMBA_EMULATED) && __CUDA_ARCH__ >= 800
template <>
__device__ __forceinline__ unsigned pair_of<bf16>(float low, float high) {
    unsigned two;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(two) : "f"(high), "f"(low));
    return two;
}
template <>
__device__ __forceinline__ unsigned pair_of<f16>(float low, float high) {
    unsigned two;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(two) : "f"(high), "f"(low));
    return two;
}
#endif

// Sums as a fragment, rounded to X.
template <class X>
__device__ __forceinline__ Fragment<X> rounded(const float (&sums)[2][4]) {
    Fragment<X> f;
    f.at[0] = pair_of<X>(sums[0][0], sums[0][1]);
    f.at[1] = pair_of<X>(sums[0][2], sums[0][3]);
    f.at[2] = pair_of<X>(sums[1][0], sums[1][1]);
    f.at[3] = pair_of<X>(sums[1][2], sums[1][3]);
    return f;
}

// F[r][k] * by[k]: a lane has k = 2t, 2t + 1 (`by_low`) and 2t + 8, 2t + 9 (`by_high`).
template <class X>
__device__ __forceinline__ Fragment<X> scaled_along_rows(const Fragment<X>& f, Float2 by_low, Float2 by_high) {
    Fragment<X> result;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const Float2 pair = pair_to_floats((const X*)0, f.at[i]), by = i < 2 ? by_low : by_high;
        result.at[i] = pair_of<X>(pair.x * by.x, pair.y * by.y);
    }
    return result;
}

template <class X>
__device__ __forceinline__ Right<X> scaled_along_rows(const Right<X>& f, Float2 by_low, Float2 by_high) {
    Right<X> result;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const Float2 pair = pair_to_floats((const X*)0, f.at[i]), by = i % 2 ? by_high : by_low;
        result.at[i] = pair_of<X>(pair.x * by.x, pair.y * by.y);
    }
    return result;
}

// --- shared memory

#ifdef ANYMAMBA_EMULATED
__device__ __forceinline__ unsigned shared_address(const void* address) {
    return (unsigned)((const unsigned char*)address - emulation::shared_memory());
}
template <class Value>
__device__ __forceinline__ Value shared_load(unsigned address) {
    Value value;
    memcpy(&value, emulation::shared_memory() + address, sizeof value);
    return value;
}
#else
__device__ __forceinline__ unsigned shared_address(const void* address) {
    unsigned result;
    asm("{ .reg .u64 a; cvta.to.shared.u64 a, %1; cvt.u32.u64 %0, a; }" : "=r"(result) : "l"(address));
    return result;
}
template <class Value>
__device__ __forceinline__ Value shared_load(unsigned address);
template <>
__device__ __forceinline__ unsigned shared_load<unsigned>(unsigned address) {
    unsigned value;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(address));
    return value;
}
template <>
__device__ __forceinline__ unsigned short shared_load<unsigned short>(unsigned address) {
    unsigned short value;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(value) : "r"(address));
    return value;
}
template <>
__device__ __forceinline__ float shared_load<float>(unsigned address) {
    float value;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(address));
    return value;
}
template <>
__device__ __forceinline__ Float2 shared_load<Float2>(unsigned address) {
    Float2 value;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(value.x), "=f"(value.y) : "r"(address));
    return value;
}
#endif

// 16 bytes from global to shared memory, zeros if not `valid` (then nothing is read). From sm_80 on asynchronous: they have
// arrived for this thread after `wait_copies<N>` has seen all but the last N commits; a barrier shows them to the others.
__device__ __forceinline__ void copy_async_16(unsigned to, const void* from, bool valid) {
#ifdef ANYMAMBA_EMULATED
    if (valid) memcpy(emulation::shared_memory() + to, from, 16);
    else memset(emulation::shared_memory() + to, 0, 16);
#elif __CUDA_ARCH__ >= 800
    const int bytes = valid ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
#else
    uint4 value = {0, 0, 0, 0};
    if (valid) value = *static_cast<const uint4*>(from);
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(value.x), "r"(value.y), "r"(value.z),
                 "r"(value.w)
                 : "memory");
#endif
}
__device__ __forceinline__ void commit_copies() {
#if !defined(ANYMAMBA_EMULATED) && __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
template <int N>
__device__ __forceinline__ void wait_copies() {
#if !defined(ANYMAMBA_EMULATED) && __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
#endif
}

// --- loading fragments. The address is that of the tile's first element plus the lane's own offset, so that a loop over tiles
// adds constants only: load_rows<X, stride>(shared_address(tile) + rows_offset<X>(stride)).

template <class X>
__device__ __forceinline__ unsigned rows_offset(int stride) {
    const int lane = threadIdx.x % 32;
    if (sizeof(X) == 2) return (lane % 16 * stride + lane / 16 * 8) * 2;
    return (lane / 4 * stride + lane % 4 * 2) * 4;
}
template <class X>
__device__ __forceinline__ unsigned columns_offset(int stride) {
    const int lane = threadIdx.x % 32;
    if (sizeof(X) == 2) return ((lane % 8 + lane / 16 * 8) * stride + lane / 8 % 2 * 8) * 2;
    return (lane % 4 * 2 * stride + lane / 4) * 4;
}

template <class X>
__device__ __forceinline__ unsigned right_rows_offset(int stride) {
    const int lane = threadIdx.x % 32;
    return sizeof(X) == 2 ? ((lane % 8 + lane / 16 * 8) * stride + lane / 8 % 2 * 8) * 2 : rows_offset<X>(stride);
}
template <class X>
__device__ __forceinline__ unsigned right_columns_offset(int stride) {
    const int lane = threadIdx.x % 32;
    return sizeof(X) == 2 ? (lane % 16 * stride + lane / 16 * 8) * 2 : columns_offset<X>(stride);
}

// The eight rows of four 8 x 8 matrices of 16-bit elements: lane i names row i % 8 of matrix i / 8.
__device__ __forceinline__ void load_matrices(unsigned (&to)[4], unsigned address) {
#if !defined(ANYMAMBA_EMULATED) && __CUDA_ARCH__ >= 750
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(address));
#else
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 4; ++i)
        to[i] = shared_load<unsigned>(__shfl_sync(ALL_LANES, address, i * 8 + lane / 4) + lane % 4 * 4);
#endif
}
__device__ __forceinline__ void load_transposed_matrices(unsigned (&to)[4], unsigned address) {
#if !defined(ANYMAMBA_EMULATED) && __CUDA_ARCH__ >= 750
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(address));
#else
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const unsigned low = __shfl_sync(ALL_LANES, address, i * 8 + lane % 4 * 2);
        const unsigned high = __shfl_sync(ALL_LANES, address, i * 8 + lane % 4 * 2 + 1);
        to[i] = (unsigned)shared_load<unsigned short>(low + lane / 4 * 2) |
                (unsigned)shared_load<unsigned short>(high + lane / 4 * 2) << 16;
    }
#endif
}

template <class X, int stride>
struct Loading {
    static __device__ __forceinline__ void rows(unsigned (&to)[4], unsigned address) { load_matrices(to, address); }
    static __device__ __forceinline__ void columns(unsigned (&to)[4], unsigned address) {
        load_transposed_matrices(to, address);
    }
    static constexpr bool in_order = true;  // that of the addresses
};
template <int stride>
struct Loading<float, stride> {
    static __device__ __forceinline__ void rows(Float2 (&to)[4], unsigned address) {
#pragma unroll
        for (int i = 0; i < 4; ++i) to[i] = shared_load<Float2>(address + (i % 2 * 8 * stride + i / 2 * 8) * 4);
    }
    static __device__ __forceinline__ void columns(Float2 (&to)[4], unsigned address) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const unsigned here = address + (i / 2 * 8 * stride + i % 2 * 8) * 4;
            to[i].x = shared_load<float>(here);
            to[i].y = shared_load<float>(here + stride * 4);
        }
    }
    static constexpr bool in_order = false;
};

template <class X, int stride>
__device__ __forceinline__ Fragment<X> load_rows(unsigned address) {
    Fragment<X> f;
    Loading<X, stride>::rows(f.at, address);
    return f;
}
template <class X, int stride>
__device__ __forceinline__ Fragment<X> load_columns(unsigned address) {
    Fragment<X> f;
    Loading<X, stride>::columns(f.at, address);
    return f;
}

template <class X, int stride>
__device__ __forceinline__ Right<X> load_right_rows(unsigned address) {
    Fragment<X> f = load_rows<X, stride>(address);
    return Loading<X, stride>::in_order ? Right<X>{{f.at[0], f.at[1], f.at[2], f.at[3]}} : as_right(f);
}
template <class X, int stride>
__device__ __forceinline__ Right<X> load_right_columns(unsigned address) {
    Fragment<X> f = load_columns<X, stride>(address);
    return Loading<X, stride>::in_order ? Right<X>{{f.at[0], f.at[1], f.at[2], f.at[3]}} : as_right(f);
}

// --- multiplying

// The float nearest to x of 11 bits: what the tensor cores keep of a tf32 operand anyway, rounded instead of cut.
__device__ __forceinline__ float tf32_of(float x) {
#if !defined(ANYMAMBA_EMULATED) && __CUDA_ARCH__ >= 800
    unsigned y;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(x));
    return __uint_as_float(y);
#else
    return __uint_as_float((__float_as_uint(x) + 0x1000u) & 0xffffe000u);
#endif
}

#ifdef ANYMAMBA_EMULATED
// All lanes leave their fragments, one exchange, then each computes its own sums.
template <class X>
__device__ __forceinline__ void multiply_once(float (&sums)[2][4], const Fragment<X>& a, const Right<X>& b) {
    float own[16];
    for (int i = 0; i < 4; ++i) {
        const Float2 left = pair_to_floats((const X*)0, a.at[i]), right = pair_to_floats((const X*)0, b.at[i]);
        own[2 * i] = left.x;
        own[2 * i + 1] = left.y;
        own[8 + 2 * i] = right.x;
        own[8 + 2 * i + 1] = right.y;
    }
    const float(*lanes)[16] = emulation::exchange_floats(own);
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    for (int half = 0; half < 2; ++half)
        for (int i = 0; i < 4; ++i) {
            const int row = i / 2, column = 2 * t + i % 2;  // row: of the pair g, g + 8; column: 0..7 of this half
            float sum = sums[half][i];
            for (int k = 0; k < 16; ++k) {
                const int at = 2 * (k / 8 * 2) + k % 2, from = k % 8 / 2;
                sum = fmaf(lanes[g * 4 + from][at + 2 * row], lanes[column * 4 + from][8 + 2 * (2 * half + k / 8) + k % 2], sum);
            }
            sums[half][i] = sum;
        }
}
#else
// Right on every card: operands travel by shuffles. A function that is called, by value so that all stays in registers: a kernel
// has a hundred products, and compiling that many copies takes minutes.
struct SumsValue {
    float at[2][4];
};
template <class X>
__device__ __noinline__ SumsValue multiply_by_shuffles(SumsValue sums, Fragment<X> a, Right<X> b) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int from = 0; from < 4; ++from) {
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            Float2 left[2];
#pragma unroll
            for (int row = 0; row < 2; ++row) {
                const Float2 own = pair_to_floats((const X*)0, a.at[2 * k + row]);
                left[row].x = __shfl_sync(ALL_LANES, own.x, g * 4 + from);
                left[row].y = __shfl_sync(ALL_LANES, own.y, g * 4 + from);
            }
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const Float2 own = pair_to_floats((const X*)0, b.at[2 * half + k]);
#pragma unroll
                for (int column = 0; column < 2; ++column) {
                    const float x = __shfl_sync(ALL_LANES, own.x, (2 * t + column) * 4 + from);
                    const float y = __shfl_sync(ALL_LANES, own.y, (2 * t + column) * 4 + from);
#pragma unroll
                    for (int row = 0; row < 2; ++row) {
                        float& sum = sums.at[half][2 * row + column];
                        sum = fmaf(left[row].x, x, fmaf(left[row].y, y, sum));
                    }
                }
            }
        }
    }
    return sums;
}

template <class X>
__device__ __forceinline__ void multiply_once(float (&sums)[2][4], const Fragment<X>& a, const Right<X>& b) {
    SumsValue value;
#pragma unroll
    for (int i = 0; i < 8; ++i) value.at[i / 4][i % 4] = sums[i / 4][i % 4];
    value = multiply_by_shuffles(value, a, b);
#pragma unroll
    for (int i = 0; i < 8; ++i) sums[i / 4][i % 4] = value.at[i / 4][i % 4];
}
#if __CUDA_ARCH__ >= 800
template <>
__device__ __forceinline__ void multiply_once<bf16>(
    float (&sums)[2][4], const Fragment<bf16>& a, const Right<bf16>& b) {
#pragma unroll
    for (int half = 0; half < 2; ++half)
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(sums[half][0]), "+f"(sums[half][1]), "+f"(sums[half][2]), "+f"(sums[half][3])
            : "r"(a.at[0]), "r"(a.at[1]), "r"(a.at[2]), "r"(a.at[3]), "r"(b.at[2 * half]), "r"(b.at[2 * half + 1]));
}
template <>
__device__ __forceinline__ void multiply_once<f16>(float (&sums)[2][4], const Fragment<f16>& a, const Right<f16>& b) {
#pragma unroll
    for (int half = 0; half < 2; ++half)
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(sums[half][0]), "+f"(sums[half][1]), "+f"(sums[half][2]), "+f"(sums[half][3])
            : "r"(a.at[0]), "r"(a.at[1]), "r"(a.at[2]), "r"(a.at[3]), "r"(b.at[2 * half]), "r"(b.at[2 * half + 1]));
}
// k = 2t stands for slot t of the instruction and 2t + 1 for slot t + 4: the order of k does not matter as long as both agree.
template <>
__device__ __forceinline__ void multiply_once<float>(
    float (&sums)[2][4], const Fragment<float>& a, const Right<float>& b) {
#pragma unroll
    for (int k = 0; k < 4; k += 2)
#pragma unroll
        for (int half = 0; half < 2; ++half)
            asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                : "+f"(sums[half][0]), "+f"(sums[half][1]), "+f"(sums[half][2]), "+f"(sums[half][3])
                : "r"(__float_as_uint(a.at[k].x)), "r"(__float_as_uint(a.at[k + 1].x)), "r"(__float_as_uint(a.at[k].y)),
                  "r"(__float_as_uint(a.at[k + 1].y)), "r"(__float_as_uint(b.at[2 * half + k / 2].x)),
                  "r"(__float_as_uint(b.at[2 * half + k / 2].y)));
}
#elif __CUDA_ARCH__ >= 750
template <>
__device__ __forceinline__ void multiply_once<f16>(float (&sums)[2][4], const Fragment<f16>& a, const Right<f16>& b) {
#pragma unroll
    for (int k = 0; k < 4; k += 2)
#pragma unroll
        for (int half = 0; half < 2; ++half)
            asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
                : "+f"(sums[half][0]), "+f"(sums[half][1]), "+f"(sums[half][2]), "+f"(sums[half][3])
                : "r"(a.at[k]), "r"(a.at[k + 1]), "r"(b.at[2 * half + k / 2]));
}
#endif
#endif

// A fragment as its tf32 part and what is left of it. Only for f32.
template <class Operand>
__device__ __forceinline__ void split(const Operand& f, Operand& high, Operand& low) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        high.at[i] = {tf32_of(f.at[i].x), tf32_of(f.at[i].y)};
        low.at[i] = {tf32_of(f.at[i].x - high.at[i].x), tf32_of(f.at[i].y - high.at[i].y)};
    }
}

// S += A * B^T. `once` matters for f32 alone: one product in tf32, or three.
template <bool once, class X>
__device__ __forceinline__ void multiply_add(float (&sums)[2][4], const Fragment<X>& a, const Right<X>& b) {
    multiply_once(sums, a, b);
}
#if defined(ANYMAMBA_EMULATED) || __CUDA_ARCH__ >= 800
template <bool once>
__device__ __forceinline__ void multiply_add(
    float (&sums)[2][4], const Fragment<float>& a, const Right<float>& b) {
    Fragment<float> a_high, a_low;
    Right<float> b_high, b_low;
    split(a, a_high, a_low);
    split(b, b_high, b_low);
    if (!once) {
        multiply_once(sums, a_low, b_high);
        multiply_once(sums, a_high, b_low);
    }
    multiply_once(sums, a_high, b_high);
}
#endif
template <bool once, class X>
__device__ __forceinline__ void multiply_add(float (&sums)[2][4], const Fragment<X>& a, const Fragment<X>& b) {
    multiply_add<once>(sums, a, as_right(b));
}
