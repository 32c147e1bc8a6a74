// States at the chunks' bounds, for the backward of the state-space dual scan. One kernel serves both directions:
//
//     forward:  S = exp(sum of the chunk's d*A) * S + X^T (exp(what is left of the chunk) * d * B)      S before each chunk
//     reverse:  R = exp(sum of the chunk's d*A) * R + G^T (exp(what has passed of the chunk) * C)       R after each chunk
//
// S is the state that enters a chunk; R, headdim x dstate as S, the gradient of the state that leaves it; G that of the output.
//
// Algorithm: one block walks the chunks of one (batch, head, PT columns of headdim) in order with the state in registers (float),
// and writes it at every bound, rounded to X: what the tensor cores of ssd_backward.cu take. After the last chunk the state goes
// out as float: the reverse direction's is the gradient of the initial states. The blocks of both directions run side by side.
//
// Thread mapping: WARPS warps, each a part of the states (NT / 16 tiles of 16) times all PT columns or a part of them. Tiles of the
// next chunk arrive by cp.async while this one's are multiplied; one warp at a time works out d and cs of the next chunk.
//
// Bytes: x and B (dout and C) once, and a state a chunk: headdim * dstate * sizeof(X), the most of it. Floor on an H200, bf16, H32 P64
// N128, batch 4, L 8192, chunks of 64: 0.80 GB for both directions, 0.17 ms.
//
// Macros: X; Q, PT, NT, WARPS, TF32, SEQUENCES, PACKED: as in ssd_forward.cu.
#include "ssd.cuh"

#define THREADS (WARPS * 32)
#define STATE_N_WARPS (NT / 16 < WARPS ? NT / 16 : WARPS)
#define STATE_P_WARPS (WARPS / STATE_N_WARPS)
#define STATE_N (NT / STATE_N_WARPS)
#define STATE_P (PT / STATE_P_WARPS)
#define X_STRIDE padded_stride<X>(PT)
#define N_STRIDE padded_stride<X>(NT)
#define X_TILE (Q * X_STRIDE)
#define STAGE (X_TILE + Q * N_STRIDE)
#define SCALARS (4 * Q + 4)
#define RUNS (SEQUENCES ? Q : 0)

static_assert(STATE_N % 16 == 0 && STATE_P % 16 == 0, "shape");

struct SsdStatesParameters {
    const void* x;
    const void* dout;
    const void* B;
    const void* C;
    const void* dt;
    const void* A;
    const void* dt_bias;
    const void* initial_states;
    const void* dfinal_states;
    const void* seq_idx;
    void* states;   // (batch, chunks, heads, headdim, dstate): S
    void* dstates;  // R
    float* dinitial_states;    // (batch, heads, headdim, dstate), or null
    long long x_stride[4];     // batch, step, head, column
    long long dout_stride[4];
    long long B_stride[4];     // batch, step, group, state
    long long C_stride[4];
    long long dt_stride[3];
    long long initial_stride[4];
    long long dfinal_stride[4];
    long long seq_stride[2];
    long long A_stride, bias_stride;
    int dt_type, A_type, bias_type, initial_type, dfinal_type, seq_wide;
    int heads, group_heads, headdim, dstate, seqlen, tiles, softplus;
    float dt_min, dt_max;
};

extern "C" __global__ void __launch_bounds__(THREADS) ssd_states(const SsdStatesParameters p) {
    DYNAMIC_SHARED(shared_memory);
    X* const stages = reinterpret_cast<X*>(shared_memory);
    float* const scalars = reinterpret_cast<float*>(stages + 2 * STAGE);
    int* const runs = reinterpret_cast<int*>(scalars + 2 * SCALARS);

    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    // blockIdx.x = (batch, head, tile of columns); blockIdx.y = direction
    const int column_begin = blockIdx.x % p.tiles * PT;
    const int head = blockIdx.x / p.tiles % p.heads, batch = blockIdx.x / p.tiles / p.heads;
    const int reverse = blockIdx.y;
    const int columns = min(PT, p.headdim - column_begin), chunks = (p.seqlen + Q - 1) / Q;
    const i64 x_row = reverse ? p.dout_stride[1] : p.x_stride[1], x_column = reverse ? p.dout_stride[3] : p.x_stride[3];
    const i64 B_row = reverse ? p.C_stride[1] : p.B_stride[1], B_column = reverse ? p.C_stride[3] : p.B_stride[3];
    const X* const x = static_cast<const X*>(reverse ? p.dout : p.x) + batch * (reverse ? p.dout_stride[0] : p.x_stride[0]) +
                       head * (reverse ? p.dout_stride[2] : p.x_stride[2]) + column_begin * x_column;
    const X* const B = static_cast<const X*>(reverse ? p.C : p.B) + batch * (reverse ? p.C_stride[0] : p.B_stride[0]) +
                       head / p.group_heads * (reverse ? p.C_stride[2] : p.B_stride[2]);

    Steps steps;
    steps.dt = p.dt;
    steps.at = batch * p.dt_stride[0] + head * p.dt_stride[2];
    steps.stride = p.dt_stride[1];
    steps.type = p.dt_type;
    steps.bias = p.dt_bias ? load_any(p.dt_bias, p.bias_type, head * p.bias_stride) : 0.0f;
    steps.A = load_any(p.A, p.A_type, head * p.A_stride);
    steps.softplus = p.softplus;
    steps.low = p.dt_min;
    steps.high = p.dt_max;

    const int state_p = warp / STATE_N_WARPS * STATE_P, state_n = warp % STATE_N_WARPS * STATE_N;
    float state[STATE_P / 16][STATE_N / 16][2][4];
    const auto each_pair = [&](auto&& action) {  // action(two neighbouring states, column, state)
#pragma unroll
        for (int i = 0; i < STATE_P / 16; ++i)
#pragma unroll
            for (int j = 0; j < STATE_N / 16; ++j)
#pragma unroll
                for (int half = 0; half < 2; ++half)
#pragma unroll
                    for (int row = 0; row < 2; ++row)
                        action(state[i][j][half] + 2 * row, state_p + i * 16 + row * 8 + g, state_n + j * 16 + half * 8 + 2 * t);
    };
    const void* const first = reverse ? p.dfinal_states : p.initial_states;
    const int first_type = reverse ? p.dfinal_type : p.initial_type;
    const i64 first_column = reverse ? p.dfinal_stride[2] : p.initial_stride[2];
    const i64 first_state = reverse ? p.dfinal_stride[3] : p.initial_stride[3];
    const i64 first_at = batch * (reverse ? p.dfinal_stride[0] : p.initial_stride[0]) +
                         head * (reverse ? p.dfinal_stride[1] : p.initial_stride[1]) + column_begin * first_column;
    each_pair([&](float* h, int column, int n) {
#pragma unroll
        for (int e = 0; e < 2; ++e)
            h[e] = first && column < columns && n + e < p.dstate
                       ? load_any(first, first_type, first_at + column * first_column + (n + e) * first_state)
                       : 0.0f;
    });

    const auto fetch = [&](X* stage, int chunk) {
        const int from = chunk * Q, to = min(from + Q, p.seqlen);
        fetch_tile<Q, PT, X_STRIDE, THREADS, PACKED>(threadIdx.x, stage, x, x_row, x_column, from, to, columns);
        fetch_tile<Q, NT, N_STRIDE, THREADS, PACKED>(
            threadIdx.x, stage + X_TILE, B, B_row, B_column, from, to, p.dstate);
        commit_copies();
    };
    float raw[(Q + 31) / 32];
    int changes[(Q + 31) / 32];
    const auto load_steps = [&](int chunk) {
        const int from = chunk * Q, to = min(from + Q, p.seqlen);
        steps.load<Q>(from, to, raw);
        load_changes<Q, SEQUENCES>(p.seq_idx, p.seq_wide, batch * p.seq_stride[0], p.seq_stride[1], from, to, changes);
    };
    // What a step's rank-one product is multiplied by takes the place of `leaving`, which is the forward direction's.
    const auto place = [&](int parity, int chunk) {
        float* const here = scalars + parity * SCALARS;
        int* const run = runs + parity * RUNS;
        place_scalars<Q, sizeof(X) == 4, SEQUENCES>(
            steps, raw, changes, min(Q, p.seqlen - chunk * Q), here, here + 2 * Q, here + 3 * Q, run);
        if (reverse) {
            __syncwarp();
            for (int at = lane; at < Q; at += 32)
                here[3 * Q + at] = SEQUENCES && run[at] ? 0.0f : fast_exp2(here[2 * at] + (sizeof(X) == 4 ? here[2 * Q + at] : 0.0f));
        }
    };
    const auto number = [&](int index) { return reverse ? chunks - 1 - index : index; };

    fetch(stages, number(0));
    if (warp == 0) {
        load_steps(number(0));
        place(0, number(0));
    }
    const int lane_state = state_n + (t & 1) * 8 + (t & ~1) * 2;  // once a quad's lanes have traded halves
    for (int index = 0; index < chunks; ++index) {
        const int parity = index & 1, chunk = number(index);
        const bool more = index + 1 < chunks;
        wait_copies<0>();
        __syncthreads();
        const X* const stage = stages + parity * STAGE;
        const float* const weights = scalars + parity * SCALARS + 3 * Q;
        if (more) fetch(stages + (parity ^ 1) * STAGE, number(index + 1));
        const bool my_turn = more && warp == (index + 1) % WARPS;
        if (my_turn) load_steps(number(index + 1));

        X* const bound = static_cast<X*>(reverse ? p.dstates : p.states) +
                         ((((i64)batch * chunks + chunk) * p.heads + head) * p.headdim + column_begin) * p.dstate;
        const bool odd = t & 1;
#pragma unroll
        for (int i = 0; i < STATE_P / 16; ++i)
#pragma unroll
            for (int row = 0; row < 2; ++row) {
                const int column = state_p + i * 16 + row * 8 + g;
#pragma unroll
                for (int j = 0; j < STATE_N / 16; ++j) {
                    const float* const low = state[i][j][0] + 2 * row;
                    const float* const high = state[i][j][1] + 2 * row;
                    const float got[2] = {
                        __shfl_xor_sync(ALL_LANES, odd ? low[0] : high[0], 1), __shfl_xor_sync(ALL_LANES, odd ? low[1] : high[1], 1)};
                    const float four[4] = {odd ? got[0] : low[0], odd ? got[1] : low[1], odd ? high[0] : got[0], odd ? high[1] : got[1]};
                    const int n = lane_state + j * 16;
                    store_four<X, PACKED>(bound + (i64)column * p.dstate + n, column < columns ? p.dstate - n : 0, four);
                }
            }

        const float passing = weights[Q];
        each_pair([&](float* h, int, int) {
            h[0] *= passing;
            h[1] *= passing;
        });
        const unsigned left_tile = shared_address(stage) + columns_offset<X>(X_STRIDE) + state_p * sizeof(X);
        const unsigned right_tile = shared_address(stage + X_TILE) + right_columns_offset<X>(N_STRIDE) + state_n * sizeof(X);
#pragma unroll 2
        for (int k = 0; k < Q / 16; ++k) {
            Fragment<X> left[STATE_P / 16];
            Right<X> right[STATE_N / 16];
#pragma unroll
            for (int j = 0; j < STATE_N / 16; ++j)
                right[j] = load_right_columns<X, N_STRIDE>(right_tile + (k * 16 * N_STRIDE + j * 16) * sizeof(X));
#pragma unroll
            for (int i = 0; i < STATE_P / 16; ++i)
                left[i] = load_columns<X, X_STRIDE>(left_tile + (k * 16 * X_STRIDE + i * 16) * sizeof(X));
            const Pack<float, 2> low = load_pack<float, 2>(weights + k * 16 + 2 * t);
            const Pack<float, 2> high = load_pack<float, 2>(weights + k * 16 + 2 * t + 8);
#pragma unroll
            for (int j = 0; j < STATE_N / 16; ++j) {
                const Right<X> scaled = scaled_along_rows(right[j], Float2{low.at[0], low.at[1]}, Float2{high.at[0], high.at[1]});
#pragma unroll
                for (int i = 0; i < STATE_P / 16; ++i) multiply_add<TF32>(state[i][j], left[i], scaled);
            }
        }
        if (my_turn) place(parity ^ 1, number(index + 1));
    }

    if (reverse && p.dinitial_states) {
        float* const to = p.dinitial_states + (((i64)batch * p.heads + head) * p.headdim + column_begin) * p.dstate;
        each_pair([&](const float* h, int column, int n) {
#pragma unroll
            for (int e = 0; e < 2; ++e)
                if (column < columns && n + e < p.dstate) to[(i64)column * p.dstate + n + e] = h[e];
        });
    }
}
