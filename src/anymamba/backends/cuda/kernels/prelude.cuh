// What every kernel shares: element types and their conversions, fast math by name, vector access, small reductions.
//
// Nothing of the toolkit is included: NVRTC before 13.3 does not find cuda_fp16.h or cuda_bf16.h without header wheels.
// 16-bit floats are therefore plain structs of 16 bits here, converted by inline PTX (bf16 -> float is a shift).
// Element types are chosen by macros, e.g. -DX=bf16. No macro may be named T: NVRTC's own header has template <typename T>.
// ANYMAMBA_EMULATED: the tests run the kernels on the CPU (tests/cuda_emulator.py), where PTX means nothing.
#pragma once

typedef float f32;
struct f16 {
    unsigned short bits;
};
struct bf16 {
    unsigned short bits;
};

typedef long long i64;

#define LOG2E 1.4426950408889634f
#define LN2 0.6931471805599453f
#define ALL_LANES 0xffffffffu

// Dynamic shared memory, aligned for any use: DYNAMIC_SHARED(name); gives `unsigned char* name` or an array of that name.
#ifdef ANYMAMBA_EMULATED
#define DYNAMIC_SHARED(name) unsigned char* name = emulation::shared_memory()
#else
#define DYNAMIC_SHARED(name) extern __shared__ __align__(128) unsigned char name[]
#endif

// --- conversions: always computed in float

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(bf16 x) { return __uint_as_float((unsigned)x.bits << 16); }
#ifdef ANYMAMBA_EMULATED
__device__ __forceinline__ float to_float(f16 x) { return emulated_half_to_float(x.bits); }
#else
__device__ __forceinline__ float to_float(f16 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
}
#endif

template <class Element>
__device__ __forceinline__ Element from_float(float x);

template <>
__device__ __forceinline__ float from_float<float>(float x) {
    return x;
}

template <>
__device__ __forceinline__ f16 from_float<f16>(float x) {
    f16 y;
#ifdef ANYMAMBA_EMULATED
    y.bits = emulated_float_to_half(x);
#else
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
#endif
    return y;
}

template <>
__device__ __forceinline__ bf16 from_float<bf16>(float x) {
    bf16 y;
#if !defined(ANYMAMBA_EMULATED) && __CUDA_ARCH__ >= 800
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
#else  // round to nearest even; a NaN stays one
    unsigned u = __float_as_uint(x);
    y.bits = (u & 0x7fffffffu) > 0x7f800000u ? 0x7fff : (unsigned short)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
#endif
    return y;
}

// --- fast math: one or two instructions each; relative error about 2e-7

#ifdef ANYMAMBA_EMULATED
__device__ __forceinline__ float fast_exp2(float x) { return exp2f(x); }
__device__ __forceinline__ float fast_log2(float x) { return log2f(x); }
__device__ __forceinline__ float fast_reciprocal(float x) { return 1.0f / x; }
#else
__device__ __forceinline__ float fast_exp2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ float fast_log2(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ float fast_reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
#endif

__device__ __forceinline__ float fast_exp(float x) { return fast_exp2(x * LOG2E); }
// For x < -87 the exponential overflows to infinity and the reciprocal is 0: the limit.
__device__ __forceinline__ float sigmoid(float x) { return fast_reciprocal(1.0f + fast_exp2(-LOG2E * x)); }
__device__ __forceinline__ float silu(float x) { return x * sigmoid(x); }
__device__ __forceinline__ float silu_derivative(float x) {
    float gate = sigmoid(x);
    return gate * (1.0f + x * (1.0f - gate));
}
// log(1 + e^x), x itself above 20 as PyTorch has it. Accurate: lg2.approx would be off by 1e-5 for small e.
__device__ __forceinline__ float softplus(float x) { return x > 20.0f ? x : log1pf(fast_exp(x)); }
__device__ __forceinline__ float softplus_derivative(float x) { return x > 20.0f ? 1.0f : sigmoid(x); }

// --- vectors: N elements moved by one access of N * sizeof(Element) bytes (16 at most), aligned to that.
// Read all that a thread needs before the first use, without branches in between: a load inside an `if` is waited for there.

template <class Element, int N>
struct alignas(sizeof(Element) * N) Pack {
    Element at[N];
};

template <class Element, int N>
__device__ __forceinline__ Pack<Element, N> load_pack(const Element* address) {
    return *reinterpret_cast<const Pack<Element, N>*>(address);
}

template <class Element, int N>
__device__ __forceinline__ void store_pack(Element* address, const Pack<Element, N>& value) {
    *reinterpret_cast<Pack<Element, N>*>(address) = value;
}

template <class Element, int N>
__device__ __forceinline__ void to_floats(float (&to)[N], const Pack<Element, N>& from) {
#pragma unroll
    for (int i = 0; i < N; ++i) to[i] = to_float(from.at[i]);
}
// Two bf16 of a word: the low one shifted up, the high one masked; taking 16 bits out first would be an instruction more.
template <int N>
__device__ __forceinline__ void to_floats(float (&to)[N], const Pack<bf16, N>& from) {
#pragma unroll
    for (int i = 0; i + 1 < N; i += 2) {
        const unsigned two = *reinterpret_cast<const unsigned*>(&from.at[i]);
        to[i] = __uint_as_float(two << 16);
        to[i + 1] = __uint_as_float(two & 0xffff0000u);
    }
    if (N % 2) to[N - 1] = to_float(from.at[N - 1]);
}

// Rounded; one conversion instruction for two where the card has it.
template <class Element, int N>
__device__ __forceinline__ void from_floats(Pack<Element, N>& to, const float (&from)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) to.at[i] = from_float<Element>(from[i]);
}
#if !defined(ANYMAMBA_EMULATED) && __CUDA_ARCH__ >= 800
template <int N>
__device__ __forceinline__ void from_floats(Pack<bf16, N>& to, const float (&from)[N]) {
#pragma unroll
    for (int i = 0; i + 1 < N; i += 2) {
        unsigned two;
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(two) : "f"(from[i + 1]), "f"(from[i]));
        *reinterpret_cast<unsigned*>(&to.at[i]) = two;
    }
    if (N % 2) to.at[N - 1] = from_float<bf16>(from[N - 1]);
}
template <int N>
__device__ __forceinline__ void from_floats(Pack<f16, N>& to, const float (&from)[N]) {
#pragma unroll
    for (int i = 0; i + 1 < N; i += 2) {
        unsigned two;
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(two) : "f"(from[i + 1]), "f"(from[i]));
        *reinterpret_cast<unsigned*>(&to.at[i]) = two;
    }
    if (N % 2) to.at[N - 1] = from_float<f16>(from[N - 1]);
}
#endif

// --- sums in a fixed order: bit-equal in every run

// Over groups of `width` neighbouring lanes (a power of two up to 32); every lane gets the sum.
template <int width>
__device__ __forceinline__ float sum_over_lanes(float x) {
#pragma unroll
    for (int step = width / 2; step > 0; step /= 2) x += __shfl_xor_sync(ALL_LANES, x, step);
    return x;
}
