/* Included once for each type T of the inputs, and TABLE of the sums of 32 of them. */
#define SUM__(type, table) sum_##type##_in_##table
#define SUM_(type, table) SUM__(type, table)
#define SUM SUM_(T, TABLE)

/* Sums of integers times spins, 32 inputs at a time: a table holds the 16 sums of four inputs, so that four
   weights are a place in it. */
static void SUM(const T *in, const FLASH word *weight, int inputs, int units, i32 *sums)
{
    const int words = WORDS(inputs);
    TABLE tables[8][16];
    for (int unit = 0; unit < units; unit++)
        sums[unit] = 0;
    for (int start = 0; start < inputs; start += 32, weight += 32 / WORD_BITS) {
        const FLASH word *row = weight;
        const int left = WORDS(inputs - start), now = left < 32 / WORD_BITS ? left : 32 / WORD_BITS;
        for (int part = 0; part < now * (WORD_BITS / 4); part++) {
            TABLE *const table = tables[part];
            TABLE twice[4], least = 0;
            for (int k = 0; k < 4; k++) {
                const int place = start + part * 4 + k;
                const TABLE value = place < inputs ? (TABLE)in[place] : 0;
                least = (TABLE)(least - value);
                twice[k] = (TABLE)(2 * value);
            }
            table[0] = least;
            for (int k = 0, filled = 1; k < 4; k++, filled += filled)
                for (int i = 0; i < filled; i++)
                    table[filled + i] = (TABLE)(table[i] + twice[k]);
        }
        for (int unit = 0; unit < units; unit++, row += words) {
            const TABLE *table = tables[0];
            TABLE sum = 0;
            for (int i = 0; i < now; i++) {
                word bits = GET(word, row + i);
                for (int part = 0; part < WORD_BITS / 4; part++, table += 16, bits = (word)(bits >> 4))
                    sum = (TABLE)(sum + table[bits & (word)15]);
            }
            sums[unit] += sum;
        }
    }
}

#undef SUM__
#undef SUM_
#undef SUM
#undef TABLE
#undef T
