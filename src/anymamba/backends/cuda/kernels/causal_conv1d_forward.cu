// Causal depthwise convolution, forward, for rows that are contiguous in time (any strides are correct, these are fast).
//
// Formula   out[b, d, t] = act(bias[d] + sum_k weight[d, k] * x[b, d, t - (WIDTH - 1) + k]); causal_conv1d.cuh says what lies
//           outside a row and what packed sequences change. Sums in float, the bias first, taps in ascending order.
// Threads   256 as (rows, neighbouring channels of one sequence) x (pieces of a row), split by `piece_bits` so that
//           short rows leave no thread idle. A piece is 16 bytes: VEC columns, read by one access, and the WIDTH - 1
//           columns before by another that hits L1 (a neighbour lane's data). A thread has PIECES (2 or 4) pieces of one
//           row, all read before the first is used, without branches. ALIGNED: every row starts at 16 bytes and ends
//           with a whole piece; all tests for edges fall away. Otherwise pieces are shifted so that they are aligned in
//           memory whatever the row's start is, edges go element by element. HAS_STATES: initial or final states are
//           there.
// Bytes     x once, out once: 2 * B * D * L * sizeof(X). Floor = that / copy bandwidth (H200: 4.25 TB/s; B4 D2048 L8192
//           bf16 0.063 ms). Per element WIDTH FMA and 2 special-function operations: 0.034 ms of those units there,
//           hidden.
//           Measured (H200, bf16, share of the floor): 0.85 at B32 L256, 0.89 at B8 L2048, 0.92 at B4 L8192.
// Lost      4 pieces a thread on short rows: 0.80 at B32 L256; one: 0.78 there and 0.81 at B4 L8192. Holding the loads
//           before a __syncwarp: the same. One piece a thread, the next tile's read early but behind tests for edges:
//           2.2 TB/s, as the compiler converts (so waits) inside the branch that reads.
#include "causal_conv1d.cuh"

#define THREADS 256
#define VEC (16 / (int)sizeof(X))
#define HALO (WIDTH == 2 ? 2 : 4)

struct CausalConv1dForwardParameters {
    const X* x;
    const W* weight;
    const BIAS* bias;  // or 0
    const SEQ* seq_idx;
    const X* initial_states;  // or 0
    X* out;
    X* final_states;  // (batch, dim, WIDTH - 1) contiguous, or 0
    i64 x_stride[3], out_stride[3];
    i64 weight_stride[2], bias_stride, seq_stride[2], initial_stride[3];
    int batch, dim, seqlen;
    int piece_bits;  // log2 of the threads along time
    int channel_groups;  // blocks along channels
};

struct Piece {
    Pack<X, VEC> own;
    Pack<X, HALO> before;  // the last BEFORE of them are used
};

// ALIGNED: reads a piece of the row in any case; a piece past the end reads the last one, the first one's `before` is itself.
__device__ __forceinline__ Piece read_piece(
    const CausalConv1dForwardParameters& p, const X* row, const X* initial, int t0
) {
    Piece piece;
#if ALIGNED
    const X* own = row + min(t0, p.seqlen - VEC);
    piece.own = load_pack<X, VEC>(own);
    piece.before = load_pack<X, HALO>(t0 > 0 ? own - HALO : own);
#else
    piece.own = read_columns<X, VEC>(row, p.x_stride[2], t0, p.seqlen, X{});
    piece.before = read_columns<X, HALO>(row, p.x_stride[2], t0 - HALO, p.seqlen, X{});
#endif
#if HAS_STATES
    if (initial && t0 < HALO) {
#pragma unroll
        for (int j = 0; j < HALO + VEC; ++j) {
            const int t = t0 - HALO + j;
            if (t >= -BEFORE && t < 0) {
                const X value = initial[(t + BEFORE) * p.initial_stride[2]];
                (j < HALO ? piece.before.at[j < HALO ? j : 0] : piece.own.at[j < HALO ? 0 : j - HALO]) = value;
            }
        }
    }
#endif
    return piece;
}

extern "C" __global__ void __launch_bounds__(THREADS) causal_conv1d_forward(const CausalConv1dForwardParameters p) {
    const int lane = threadIdx.x & ((1 << p.piece_bits) - 1);
    const int b = blockIdx.x / p.channel_groups;
    const int d = (blockIdx.x % p.channel_groups) * (THREADS >> p.piece_bits) + (threadIdx.x >> p.piece_bits);
    if (d >= p.dim) return;
    const X* row = p.x + b * p.x_stride[0] + d * p.x_stride[1];
    X* out = p.out + b * p.out_stride[0] + d * p.out_stride[1];
    const X* initial = p.initial_states ? p.initial_states + b * p.initial_stride[0] + d * p.initial_stride[1] : (const X*)0;
#if ALIGNED
    const int shift = 0;
#else
    const int shift = misalignment<VEC>(row, p.x_stride[2]);
#endif
    const int first = (((blockIdx.y * PIECES) << p.piece_bits) + lane) * VEC - shift;
    const int step = VEC << p.piece_bits;

    Piece pieces[PIECES];
#pragma unroll
    for (int i = 0; i < PIECES; ++i) pieces[i] = read_piece(p, row, initial, first + i * step);
    float w[WIDTH];
#pragma unroll
    for (int k = 0; k < WIDTH; ++k) w[k] = to_float(p.weight[d * p.weight_stride[0] + k * p.weight_stride[1]]);
    const float bias = p.bias ? to_float(p.bias[d * p.bias_stride]) : 0.0f;

#pragma unroll
    for (int i = 0; i < PIECES; ++i) {
        const int t0 = first + i * step;
        float before[HALO], own[VEC], column[BEFORE + VEC];
        to_floats(before, pieces[i].before);
        to_floats(own, pieces[i].own);
#pragma unroll
        for (int j = 0; j < BEFORE; ++j)
            column[j] = ALIGNED && t0 == 0 && !(HAS_STATES && initial) ? 0.0f : before[HALO - BEFORE + j];
#pragma unroll
        for (int j = 0; j < VEC; ++j) column[BEFORE + j] = own[j];
#if HAS_SEQ
        const SEQ* seq_row = p.seq_idx + b * p.seq_stride[0];
        SEQ owner[BEFORE + VEC];
        {
            const SEQ before_first = seq_row[0];
            const Pack<SEQ, VEC> own = read_columns<SEQ, VEC>(seq_row, p.seq_stride[1], t0, p.seqlen, SEQ(-1));
#pragma unroll
            for (int j = 0; j < BEFORE; ++j) {
                const int t = t0 - BEFORE + j;
                owner[j] = t < 0 ? before_first : t < p.seqlen ? seq_row[t * p.seq_stride[1]] : SEQ(-1);
            }
#pragma unroll
            for (int j = 0; j < VEC; ++j) owner[BEFORE + j] = t0 + j < 0 ? before_first : own.at[j];
        }
#endif
        float y[VEC];
#pragma unroll
        for (int j = 0; j < VEC; ++j) {
            y[j] = bias;
#pragma unroll
            for (int k = 0; k < WIDTH; ++k) {
#if HAS_SEQ
                y[j] += owner[j + k] == owner[j + BEFORE] ? w[k] * column[j + k] : 0.0f;
#else
                y[j] = __fmaf_rn(w[k], column[j + k], y[j]);
#endif
            }
#if SILU
            y[j] = silu(y[j]);
#endif
#if HAS_SEQ
            if (owner[j + BEFORE] < 0) y[j] = 0.0f;
#endif
        }
        Pack<X, VEC> result;
        from_floats(result, y);
#if ALIGNED
        if (t0 < p.seqlen) store_pack<X, VEC>(out + t0, result);
#else
        write_columns<X, VEC>(result, out, p.out_stride[2], t0, p.seqlen);
#endif
#if HAS_STATES
        if (p.final_states && t0 < p.seqlen && t0 + VEC >= p.seqlen) {  // the thread of the row's last piece
#pragma unroll
            for (int j = 0; j < BEFORE; ++j) {
                const int t = p.seqlen - BEFORE + j;
                X value = t >= 0    ? row[t * p.x_stride[2]]
                          : initial ? initial[(t + BEFORE) * p.initial_stride[2]]
                                    : X{};
#if HAS_SEQ
                const SEQ last = seq_row[(p.seqlen - 1) * p.seq_stride[1]];
                if (seq_row[(t < 0 ? 0 : t) * p.seq_stride[1]] != last) value = X{};
#endif
                p.final_states[((i64)b * p.dim + d) * BEFORE + j] = value;
            }
        }
#endif
    }
}
