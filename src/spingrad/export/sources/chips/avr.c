#include <stdint.h>

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
