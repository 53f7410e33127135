// Pauli strings on a GPU: out[i] = sum over groups of scale(i) * state[i ^ flip], where scale(i) is the sum over the group's
// strings of factor * (-1)^popcount(i & sign).
//
// A thread has EACH amplitudes, whose indices differ in the bits from THREAD_BITS on. The strings of a group are sorted by
// their signs on these bits. With c[m] the sum, where these bits are zero, over strings whose signs there are m, the scales
// of the thread's amplitudes are the Walsh-Hadamard transform of c: a string is looked at once for all of them.

#define EACH (1 << TOGETHER)
#define CHUNK (EACH * THREADS)

struct Strings {
    const long long *flips, *signs;
    const int *starts;  // of the strings of each group and m, and the end
    const amplitude *factors;
};

// The scales of amplitudes i + j * THREADS.
__device__ __forceinline__ void scales_of(const Strings &strings, int group, long long i, amplitude (&scale)[EACH]) {
    const int *starts = strings.starts + group * EACH;
#pragma unroll
    for (int m = 0; m < EACH; ++m) {
        scale[m] = {0, 0};
        for (int string = starts[m]; string < starts[m + 1]; ++string) {
            bool minus = __popcll(i & strings.signs[string]) & 1;
            amplitude factor = strings.factors[string];
            scale[m].x += minus ? -factor.x : factor.x;
            scale[m].y += minus ? -factor.y : factor.y;
        }
    }
#pragma unroll
    for (int bit = 0; bit < TOGETHER; ++bit) {
#pragma unroll
        for (int j = 0; j < EACH; ++j) {
            if (j >> bit & 1) continue;
            amplitude low = scale[j], high = scale[j | 1 << bit];
            scale[j] = {low.x + high.x, low.y + high.y};
            scale[j | 1 << bit] = {low.x - high.x, low.y - high.y};
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) apply_strings(
    const amplitude *state, amplitude *out, const long long *flips, const long long *signs, const int *starts,
    const amplitude *factors, int groups, int bits) {
    Strings strings = {flips, signs, starts, factors};
    long long all = 1LL << bits;
    for (long long i = (long long)blockIdx.x * CHUNK + threadIdx.x; i < all; i += (long long)gridDim.x * CHUNK) {
        amplitude sum[EACH], scale[EACH];
#pragma unroll
        for (int j = 0; j < EACH; ++j) sum[j] = {0, 0};
        for (int group = 0; group < groups; ++group) {
            scales_of(strings, group, i, scale);
#pragma unroll
            for (int j = 0; j < EACH; ++j) {
                if (i + j * THREADS >= all) continue;
                amplitude from = state[(i + j * THREADS) ^ flips[group]];
                sum[j].x += scale[j].x * from.x - scale[j].y * from.y;
                sum[j].y += scale[j].x * from.y + scale[j].y * from.x;
            }
        }
#pragma unroll
        for (int j = 0; j < EACH; ++j)
            if (i + j * THREADS < all) out[i + j * THREADS] = sum[j];
    }
}

// The thread's part of <state|group|state>.
extern "C" __global__ void __launch_bounds__(THREADS) string_values(
    const amplitude *state, double *sums, const long long *flips, const long long *signs, const int *starts,
    const amplitude *factors, int group, int bits) {
    Strings strings = {flips, signs, starts, factors};
    long long all = 1LL << bits;
    double sum = 0;
    for (long long i = (long long)blockIdx.x * CHUNK + threadIdx.x; i < all; i += (long long)gridDim.x * CHUNK) {
        amplitude scale[EACH];
        scales_of(strings, group, i, scale);
#pragma unroll
        for (int j = 0; j < EACH; ++j) {
            if (i + j * THREADS >= all) continue;
            amplitude to = state[i + j * THREADS], from = state[(i + j * THREADS) ^ flips[group]];
            sum += (double)to.x * (scale[j].x * from.x - scale[j].y * from.y) + (double)to.y * (scale[j].x * from.y + scale[j].y * from.x);
        }
    }
    sums[(long long)blockIdx.x * THREADS + threadIdx.x] = sum;
}
