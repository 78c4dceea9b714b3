/* Sounds as the server reads them: WAV files of 16 kHz, mono, 16 bits; from files of other kinds, and from the microphone. */

const RATE = 16000;
const HEADER = 44; // bytes

/* A WAV file of samples from -1 to 1. */
function wavFile(samples) {
  const view = new DataView(new ArrayBuffer(HEADER + 2 * samples.length));
  const write = (at, text) => [...text].forEach((character, index) => view.setUint8(at + index, character.charCodeAt(0)));
  write(0, "RIFF");
  view.setUint32(4, view.byteLength - 8, true);
  write(8, "WAVEfmt ");
  view.setUint32(16, 16, true); // bytes of the format
  view.setUint16(20, 1, true); // PCM
  view.setUint16(22, 1, true); // channels
  view.setUint32(24, RATE, true);
  view.setUint32(28, 2 * RATE, true); // bytes per second
  view.setUint16(32, 2, true); // bytes per sample
  view.setUint16(34, 16, true); // bits per sample
  write(36, "data");
  view.setUint32(40, 2 * samples.length, true);
  samples.forEach((sample, index) => {
    view.setInt16(HEADER + 2 * index, Math.round(Math.max(-1, Math.min(1, sample)) * 32767), true);
  });
  return new Blob([view], { type: "audio/wav" });
}

/* The mean of a buffer's channels. */
function mono(buffer) {
  const made = new Float32Array(buffer.length);
  for (let channel = 0; channel < buffer.numberOfChannels; channel++) {
    buffer.getChannelData(channel).forEach((sample, index) => (made[index] += sample / buffer.numberOfChannels));
  }
  return made;
}

/* A WAV file of the sound of a file: itself if it is one of at most `most` bytes. Throws if the browser cannot read it. */
export async function soundOf(file, most) {
  const content = await file.arrayBuffer();
  if (/wav/.test(file.type) && file.size <= most) return new Blob([content], { type: "audio/wav" });
  return wavFile(mono(await new OfflineAudioContext(1, 1, RATE).decodeAudioData(content))); // decodes to this rate
}

/* Record from the microphone. Returns { seconds, end }: functions that return how much there is, and a WAV file. Throws if the
browser has no microphone, or the user does not allow it. */
export async function record() {
  const stream = await navigator.mediaDevices.getUserMedia({ audio: true });
  const context = new AudioContext();
  const pieces = [];
  const length = () => pieces.reduce((sum, piece) => sum + piece.length, 0);
  try {
    await context.audioWorklet.addModule("recorder.js");
    const recorder = new AudioWorkletNode(context, "recorder");
    recorder.port.onmessage = ({ data }) => pieces.push(data);
    context.createMediaStreamSource(stream).connect(recorder).connect(context.destination); // it plays nothing
  } catch (error) {
    stream.getTracks().forEach((track) => track.stop());
    throw error;
  }
  const end = async () => {
    stream.getTracks().forEach((track) => track.stop());
    await context.close();
    if (!length()) throw new Error("The microphone gave no sound.");
    const whole = new OfflineAudioContext(1, Math.ceil((length() * RATE) / context.sampleRate), RATE);
    const buffer = whole.createBuffer(1, length(), context.sampleRate);
    let at = 0;
    for (const piece of pieces) {
      buffer.copyToChannel(piece, 0, at);
      at += piece.length;
    }
    const source = whole.createBufferSource();
    source.buffer = buffer;
    source.connect(whole.destination);
    source.start();
    return wavFile(mono(await whole.startRendering()));
  };
  return { seconds: () => length() / context.sampleRate, end };
}
