/* Runs on the browser's audio thread: passes the samples of the microphone on. */

registerProcessor("recorder", class extends AudioWorkletProcessor {
  process([[samples]]) {
    if (samples) this.port.postMessage(samples.slice());
    return true;
  }
});
