/* Included once for each type T of integers. */
#define NAMED__(name, type) name##_##type
#define NAMED_(name, type) NAMED__(name, type)
#define NAMED(name) NAMED_(name, T)

/* Sums of integers times whole numbers. */
static void NAMED(sum_whole)(const T *in, const FLASH i8 *weight, int inputs, int units, i32 *sums)
{
    for (int unit = 0; unit < units; unit++) {
        i32 sum = 0;
        for (int i = 0; i < inputs; i++, weight++)
            sum += (i32)in[i] * GET(i8, weight);
        sums[unit] = sum;
    }
}

static void NAMED(patch_of)(const T *in, const FLASH geometry *where, int first, int y, int x, T *patch)
{
    const geometry g = GET(geometry, where);
    for (int i = 0; i < g.kernel_height; i++)
        for (int j = 0; j < g.kernel_width; j++) {
            const int row = y * g.stride_down - g.top + i * g.dilation_down;
            const int column = x * g.stride_right - g.left + j * g.dilation_right;
            const int inside = row >= 0 && row < g.height && column >= 0 && column < g.width;
            int place = (row * g.width + column) * g.pixel + first * g.channel;
            for (int c = 0; c < g.channels; c++, place += g.channel)
                *patch++ = (T)(inside ? in[place] : 0);
        }
}

static void NAMED(pool)(const T *in, const FLASH geometry *where, int first, int y, int x, int add, int units,
                        i32 *sums)
{
    const geometry g = GET(geometry, where);
    for (int c = 0; c < units; c++) {
        i32 result = 0;
        for (int i = 0; i < g.kernel_height; i++)
            for (int j = 0; j < g.kernel_width; j++) {
                const int pixel = (y * g.stride_down + i) * g.width + x * g.stride_right + j;
                const i32 value = in[pixel * g.pixel + (first + c) * g.channel];
                if (add)
                    result += value;
                else if ((!i && !j) || value > result)
                    result = value;
            }
        sums[c] = result;
    }
}

static void NAMED(load)(const T *in, int place, int stride, int units, i32 *sums)
{
    for (int unit = 0; unit < units; unit++, place += stride)
        sums[unit] = in[place];
}

static void NAMED(join)(const T *in, int place, int stride, i32 multiplier, int units, i32 *sums)
{
    for (int unit = 0; unit < units; unit++, place += stride)
        sums[unit] += in[place] * multiplier;
}

/* Zeros outside of the image: top, left and first may be negative or beyond its end. */
static void NAMED(pad)(const T *in, const FLASH geometry *where, int first, int row, int column, int units,
                       i32 *sums)
{
    const geometry g = GET(geometry, where);
    for (int c = first; c < first + units; c++) {
        const int inside =
            row >= 0 && row < g.height && column >= 0 && column < g.width && c >= 0 && c < g.channels;
        *sums++ = inside ? in[(row * g.width + column) * g.pixel + c * g.channel] : 0;
    }
}

/* Values of an image in the order of its channels. */
static void NAMED(turn)(const T *in, int channels, int pixels, int first, int units, i32 *sums)
{
    for (int i = first; i < first + units; i++)
        *sums++ = in[i % pixels * channels + i / pixels];
}

static void NAMED(compare)(const FLASH T *thresholds, int units, i32 *sums)
{
    for (int unit = 0; unit < units; unit++)
        sums[unit] = sums[unit] >= GET(T, thresholds + unit) ? 1 : -1;
}

static void NAMED(put)(const i32 *sums, int units, T *out, int place)
{
    for (int unit = 0; unit < units; unit++)
        out[place + unit] = (T)sums[unit];
}

#undef NAMED__
#undef NAMED_
#undef NAMED
#undef T
