// Classifies one example and prints the class and the time it took, once per second.
// Written by spingrad.

#include <network.h>

// In flash; replace it by your own data.
static const uint8_t /*@kind*/ example[NETWORK_INPUTS] PROGMEM = {0 /*@example*/};
static const int expected = 0 /*@expected*/;

static uint8_t /*@kind*/ input[NETWORK_INPUTS];

void setup()
{
  Serial.begin(9600);
}

void loop()
{
  memcpy_P(input, example, sizeof input);
  const unsigned long start = micros();
  const int found = network_class(input);
  const unsigned long took = micros() - start;
  Serial.print(F("class "));
  Serial.print(found);
  Serial.print(F(", expected "));
  Serial.print(expected);
  Serial.print(F(", microseconds "));
  Serial.println(took);
  delay(1000);
}
