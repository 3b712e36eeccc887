// No macOS has this function.
extern "C" void* MTLCreateDeviceThatNeverWas();

extern "C" __attribute__((used)) void* planted_fault() {
  return MTLCreateDeviceThatNeverWas();
}
