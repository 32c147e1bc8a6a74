// For test_mma.py: one warp, products of 16 x 16 tiles through every way that mma.cuh loads and multiplies them.
#include "mma.cuh"

#define STRIDE padded_stride<X>(16)

struct MmaProductParameters {
    const X* a;      // (16, 16)
    const X* b;      // (16, 16)
    const float* by;  // (16)
    float* product;  // (16, 16): A * B^T if the columns flags are 0; a transposed operand for each that is 1
    float* scaled;   // (16, 16): A * diag(by) * B^T, from fragments as they were loaded
    X* again;        // (16, 16): A * B^T rounded to X, times B^T: sums as an operand
};

extern "C" __global__ void mma_product(const MmaProductParameters p) {
    DYNAMIC_SHARED(shared_memory);
    X* const a = reinterpret_cast<X*>(shared_memory);
    X* const b = a + 16 * STRIDE;
    const int lane = threadIdx.x, g = lane / 4, t = lane % 4;
    constexpr int vector = 16 / sizeof(X);
    for (int i = lane; i < 256 / vector; i += 32) {
        const int at = i * vector / 16 * STRIDE + i * vector % 16;
        copy_async_16(shared_address(a + at), p.a + i * vector, true);
        copy_async_16(shared_address(b + at), p.b + i * vector, true);
    }
    commit_copies();
    wait_copies<0>();
    __syncwarp();
    const unsigned rows = rows_offset<X>(STRIDE), columns = columns_offset<X>(STRIDE);
    const Fragment<X> left = A_COLUMNS ? load_columns<X, STRIDE>(shared_address(a) + columns)
                                       : load_rows<X, STRIDE>(shared_address(a) + rows);
    const Fragment<X> right = B_COLUMNS ? load_columns<X, STRIDE>(shared_address(b) + columns)
                                        : load_rows<X, STRIDE>(shared_address(b) + rows);
    float sums[2][4] = {}, scaled[2][4] = {}, again[2][4] = {};
    multiply_add<TF32>(sums, left, right);
    // The same operand loaded as a right one: the same sums.
    const Right<X> straight = B_COLUMNS ? load_right_columns<X, STRIDE>(shared_address(b) + right_columns_offset<X>(STRIDE))
                                        : load_right_rows<X, STRIDE>(shared_address(b) + right_rows_offset<X>(STRIDE));
    float same[2][4] = {};
    multiply_add<TF32>(same, left, straight);
    multiply_add<TF32>(again, rounded<X>(sums), right);
    const Float2 low = {p.by[2 * t], p.by[2 * t + 1]}, high = {p.by[2 * t + 8], p.by[2 * t + 9]};
    multiply_add<TF32>(scaled, left, scaled_along_rows(straight, low, high));
    for (int half = 0; half < 2; ++half)
        for (int i = 0; i < 4; ++i) {
            const int at = (g + i / 2 * 8) * 16 + half * 8 + 2 * t + i % 2;
            p.product[at] = sums[half][i];
            p.scaled[at] = same[half][i] == sums[half][i] ? scaled[half][i] : -1.0e30f;
            p.again[at] = from_float<X>(again[half][i]);
        }
}
