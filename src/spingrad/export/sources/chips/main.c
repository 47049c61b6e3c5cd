/* Runs a network on a chip, and prints of every input the class and what it cost, at last the bytes of the
 * stack. */
#include "network.h"

#include "chip.c"

#if defined(__AVR__)
#define PLACE __flash
#else
#define PLACE
#endif
#define COUNT 1 /*@count*/
static const PLACE uint8_t /*@kind*/ inputs[COUNT][NETWORK_INPUTS] = {0 /*@inputs*/};
static uint8_t /*@kind*/ input[NETWORK_INPUTS];

static void print_number(uint32_t number, char last)
{
    char digits[10];
    int count = 0;
    do {
        digits[count++] = (char)('0' + number % 10);
        number /= 10;
    } while (number);
    while (count)
        print(digits[--count]);
    print(last);
}

int main(void)
{
    uint8_t top = 0;
    for (volatile uint8_t *byte = STACK_START; (uintptr_t)byte < (uintptr_t)&top - 16; byte++)
        *byte = 0xa5;
    start();
    for (int i = 0; i < COUNT; i++) {
        for (int k = 0; k < NETWORK_INPUTS; k++)
            input[k] = inputs[i][k];
        const uint32_t before = now();
        const int found = network_class(input);
        const uint32_t after = now();
        print_number((uint32_t)found, ' ');
        print_number((after - before) & TICKS, '\n');
    }
    volatile uint8_t *byte = STACK_START;
    while (byte < &top && *byte == 0xa5)
        byte++;
    print('s');
    print_number((uint32_t)(&top - byte), '\n');
    stop();
    return 0;
}
