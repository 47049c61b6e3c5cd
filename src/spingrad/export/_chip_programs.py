"""What a program needs around a network on a bare chip: start, timer, output, ``main`` and memory."""

START_AVR = """\
#define TICKS 0xffffffffu
#include <avr/interrupt.h>
#include <avr/io.h>
#include <avr/sleep.h>
#define STACK_START (&__heap_start)
extern uint8_t __heap_start;
static volatile uint16_t overflows;
ISR(TIMER1_OVF_vect) { overflows++; }
static void print(char letter)
{
    while (!(UCSR0A & (1 << UDRE0)))
        ;
    UDR0 = (uint8_t)letter;
}
static void start(void)
{
    UCSR0B = 1 << TXEN0;
    TCCR1B = 1;
    TIMSK1 = 1;
    sei();
}
static uint32_t now(void)
{
    cli();
    const uint16_t low = TCNT1;
    uint16_t high = overflows;
    if ((TIFR1 & 1) && low < 32768)
        high++;
    sei();
    return (uint32_t)high << 16 | low;
}
static void stop(void)
{
    cli();
    sleep_enable();
    sleep_cpu();
}
"""
START_ARM = """\
#define TICKS 0xffffffu /* SysTick has 24 bits */
#define STACK_START (&stack_start)
extern uint8_t stack_start, stack_end, bss_start;
int main(void);
void reset(void);
#define SYSTICK ((volatile uint32_t *)0xe000e010u)
static int ask(int operation, const void *argument)
{
    register int r0 __asm__("r0") = operation;
    register const void *r1 __asm__("r1") = argument;
    __asm__ volatile("bkpt 0xab" : "+r"(r0) : "r"(r1) : "memory");
    return r0;
}
static void print(char letter) { ask(3, &letter); }
static void start(void)
{
    SYSTICK[1] = 0xffffff;
    SYSTICK[2] = 0;
    SYSTICK[0] = 5;
}
static uint32_t now(void) { return 0xffffff - SYSTICK[2]; }
static void stop(void) { ask(0x18, (const void *)0x20026); }
void reset(void)
{
    for (uint8_t *byte = &bss_start; byte < &stack_start; byte++)
        *byte = 0;
    main();
}
__attribute__((section(".vectors"), used)) static const void *const vectors[] = {
    (const void *)&stack_end, (const void *)reset};
"""
START_RISCV = """\
#define TICKS 0xffffffffu
#define STACK_START (&stack_start)
extern uint8_t stack_start, stack_end, bss_start;
int main(void);
void reset(void);
static void print(char letter) { *(volatile uint8_t *)0x10000000u = (uint8_t)letter; }
static void start(void) {}
static uint32_t now(void)
{
    uint32_t count;
    __asm__ volatile(".option arch, +zicsr\\ncsrr %0, minstret" : "=r"(count));
    return count;
}
static void stop(void) { *(volatile uint32_t *)0x100000u = 0x5555; }
void reset(void)
{
    for (uint8_t *byte = &bss_start; byte < &stack_start; byte++)
        *byte = 0;
    main();
    for (;;)
        ;
}
__asm__(".section .vectors\\n.globl first\\nfirst: la sp, stack_end\\nj reset\\n.text");
"""
MAIN = """\
#include "network.h"
@chip@
#if defined(__AVR__)
#define PLACE __flash
#else
#define PLACE
#endif
static const PLACE @kind@ inputs[@count@][NETWORK_INPUTS] = {
    @inputs@
};
static @kind@ input[NETWORK_INPUTS];

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
    for (volatile uint8_t *byte = STACK_START; byte < &top - 16; byte++)
        *byte = 0xa5;
    start();
    for (int i = 0; i < @count@; i++) {
        for (int k = 0; k < NETWORK_INPUTS; k++)
            input[k] = inputs[i][k];
        const uint32_t before = now();
        const int found = network_class(input);
        const uint32_t after = now();
        print_number((uint32_t)found, ' ');
        print_number((after - before) & TICKS, '\\n');
    }
    volatile uint8_t *byte = STACK_START;
    while (byte < &top && *byte == 0xa5)
        byte++;
    print('s');
    print_number((uint32_t)(&top - byte), '\\n');
    stop();
    return 0;
}
"""
LAYOUT = """\
MEMORY { flash : ORIGIN = @flash_start@, LENGTH = @flash@  ram : ORIGIN = @ram_start@, LENGTH = @ram@ }
SECTIONS {
  .text : { KEEP(*(.vectors)) *(.text* .rodata* .srodata*) } > flash
  .data : { *(.data* .sdata*) } > ram AT > flash
  .bss (NOLOAD) : { bss_start = .; *(.bss* .sbss* COMMON) . = ALIGN(4); } > ram
  stack_start = .;
  stack_end = ORIGIN(ram) + LENGTH(ram);
}
"""
