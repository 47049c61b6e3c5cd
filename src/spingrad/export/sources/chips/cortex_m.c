#include <stdint.h>

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
    (const void *)&stack_end, (const void *)(uintptr_t)reset};
