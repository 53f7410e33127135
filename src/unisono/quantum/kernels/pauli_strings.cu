// Pauli words on a GPU: out[i] = sum over groups of scale(i) * state[i ^ flip], where scale(i) is the sum over the group's
// words of factor * (-1)^popcount(i & sign). Each thread has its own amplitudes and its own sum.

struct Words {
    const long long *flips, *signs;
    const int *starts;  // of each group's words, and the end
    const amplitude *factors;
};

__device__ amplitude scale_of(const Words &words, int group, long long i) {
    amplitude scale = {0, 0};
    for (int word = words.starts[group]; word < words.starts[group + 1]; ++word) {
        bool minus = __popcll(i & words.signs[word]) & 1;
        scale.x += minus ? -words.factors[word].x : words.factors[word].x;
        scale.y += minus ? -words.factors[word].y : words.factors[word].y;
    }
    return scale;
}

extern "C" __global__ void __launch_bounds__(THREADS) apply_words(
    const amplitude *state, amplitude *out, const long long *flips, const long long *signs, const int *starts,
    const amplitude *factors, int groups, int bits) {
    Words words = {flips, signs, starts, factors};
    for (long long i = (long long)blockIdx.x * THREADS + threadIdx.x; i < 1LL << bits; i += (long long)gridDim.x * THREADS) {
        amplitude sum = {0, 0};
        for (int group = 0; group < groups; ++group) {
            amplitude scale = scale_of(words, group, i), from = state[i ^ flips[group]];
            sum.x += scale.x * from.x - scale.y * from.y;
            sum.y += scale.x * from.y + scale.y * from.x;
        }
        out[i] = sum;
    }
}

// The thread's part of <state|group|state>.
extern "C" __global__ void __launch_bounds__(THREADS) word_values(
    const amplitude *state, double *sums, const long long *flips, const long long *signs, const int *starts,
    const amplitude *factors, int group, int bits) {
    Words words = {flips, signs, starts, factors};
    long long first = (long long)blockIdx.x * THREADS + threadIdx.x;
    double sum = 0;
    for (long long i = first; i < 1LL << bits; i += (long long)gridDim.x * THREADS) {
        amplitude scale = scale_of(words, group, i), from = state[i ^ flips[group]], to = state[i];
        sum += (double)to.x * (scale.x * from.x - scale.y * from.y) + (double)to.y * (scale.x * from.y + scale.y * from.x);
    }
    sums[first] = sum;
}
