const at = (id) => document.getElementById(id);
const make = (name, properties = {}, ...children) => {
  const element = Object.assign(document.createElement(name), properties);
  element.append(...children);
  return element;
};
const brief = (name) => ([...name].length > 24 ? `${[...name].slice(0, 23).join("")}…` : name);
const percent = (share) => `${(100 * share).toFixed(1)} %`;
const bar = (value, label) => make("progress", { max: 1, value, ariaLabel: label });

let image = null; // a Blob
let lost = new Set();
let asked = 0;
const { fit, task } = document.body.dataset; // how an image is made to fit the network's rows and columns
const amount = ({ probability, value }) => (value === undefined ? percent(probability) : `${+value.toPrecision(5)}`);
const size = document.body.dataset.size.split(" ").map(Number);

async function call(path, options = {}) {
  const token = at("token").value;
  const headers = token ? { Authorization: `Bearer ${token}` } : {};
  const response = await fetch(path, { ...options, headers });
  const answer = await response.json();
  if (response.status === 401) at("secret").hidden = false;
  if (!response.ok) throw new Error(answer.error);
  return answer;
}

async function explain() {
  if (!image) return;
  const number = ++asked;
  const form = new FormData();
  form.append("files", image, image.name ?? "drawing.png");
  form.append("lost", [...lost].join(","));
  try {
    const answer = await call("explain", { method: "POST", body: form });
    if (number !== asked) return; // a later one is under way
    at("status").textContent = "";
    await show(answer);
  } catch (error) {
    if (number === asked) at("status").textContent = error.message;
  }
}

async function show({ top, votes, parts, maps }) {
  const times = new Set(parts.map(({ milliseconds }) => milliseconds));
  const [shared] = times.size === 1 ? times : [null]; // one program computes all parts
  const after = shared ? ` in ${shared.toFixed(0)} ms` : "";
  const voted = parts.filter((part, number) => part.top && !lost.has(number));
  const chose = voted.filter((part) => part.top.label === top[0]?.label).length;
  const whose = parts.some(({ groups }) => groups > 1) ? ` of ${voted.length} parts` : "";
  const one = task === "classify"; // other tasks answer with labels or numbers
  const agreed = one ? `, ${chose}${whose} chose it` : "";
  const counts = ` (${votes.voted} of ${votes.of} groups answered${agreed})`;
  const share = one ? ` ${(100 * top[0].probability).toFixed(0)} %` : "";
  const all = top.map((row) => `${row.label} ${amount(row)}`).join(", ") || "no label";
  const label = make("strong", { textContent: one ? top[0].label : all });
  at("votes").replaceChildren(label, share, parts.length > 1 ? counts : "", after);
  at("classes").replaceChildren(
    ...top.map((row) =>
      make("li", {}, make("span", { textContent: brief(row.label), title: row.label }), row.value === undefined ? bar(row.probability, row.label) : "", make("span", { textContent: amount(row) })),
    ),
  );
  [...at("parts").children].forEach((row, number) => {
    const { milliseconds, top } = parts[number];
    const gone = milliseconds === null;
    row.className = gone ? "gone" : lost.has(number) ? "off" : "";
    row.querySelector("progress").value = top?.probability ?? 0;
    row.lastElementChild.textContent = !top
      ? gone ? "no answer" : "no vote" // its groups were lost in training
      : `${brief(top.label)}, ${amount(top)}${shared ? "" : `, ${milliseconds.toFixed(0)} ms`}`;
  });
  const picture = await createImageBitmap(image).catch(() => null); // the server may read more
  at("maps-section").hidden = !maps.length || !picture;
  at("maps").replaceChildren(
    ...(picture ? maps : []).map(({ name, rows }) =>
      make("figure", {}, heat(picture, rows), make("figcaption", { textContent: name })),
    ),
  );
}

// The image in grey under a map, whose largest values are red.
function heat(picture, rows) {
  const canvas = make("canvas", { width: 96, height: (96 * size[0]) / size[1] });
  const small = new OffscreenCanvas(rows[0].length, rows.length);
  const pixels = rows.flat().flatMap((value) => [255, 96, 32, value * 0.85]);
  const data = new ImageData(Uint8ClampedArray.from(pixels), small.width, small.height);
  small.getContext("2d").putImageData(data, 0, 0);
  let across = canvas.width / picture.width;
  let down = canvas.height / picture.height;
  if (fit !== "stretch") across = down = (fit === "pad" ? Math.min : Math.max)(across, down);
  const [width, height] = [picture.width * across, picture.height * down];
  const context = canvas.getContext("2d");
  context.filter = "grayscale(1)";
  context.drawImage(picture, (canvas.width - width) / 2, (canvas.height - height) / 2, width, height);
  context.filter = "none";
  context.drawImage(small, 0, 0, canvas.width, canvas.height);
  return canvas;
}

function choose(blob) {
  image = blob;
  URL.revokeObjectURL(at("preview").src);
  at("preview").src = URL.createObjectURL(blob);
  at("preview").hidden = false;
  explain();
}

at("file").addEventListener("change", () => at("file").files[0] && choose(at("file").files[0]));
for (const kind of ["dragover", "dragleave", "drop"])
  at("drop").addEventListener(kind, (event) => {
    event.preventDefault();
    at("drop").classList.toggle("over", kind === "dragover");
    if (kind === "drop" && event.dataTransfer.files[0]) choose(event.dataTransfer.files[0]);
  });

const board = at("draw");
const pen = board.getContext("2d");
let place = [112, 112];
let waiting = 0;
function clear() {
  pen.fillStyle = "#000";
  pen.fillRect(0, 0, board.width, board.height);
  Object.assign(pen, { strokeStyle: "#fff", lineWidth: 22, lineCap: "round", lineJoin: "round" });
}
function line(to) {
  pen.beginPath();
  pen.moveTo(...place);
  pen.lineTo(...to);
  pen.stroke();
  place = to;
  clearTimeout(waiting);
  waiting = setTimeout(() => board.toBlob(choose), 150);
}
const point = (event) => {
  const box = board.getBoundingClientRect();
  const scale = board.width / box.width;
  return [(event.clientX - box.left) * scale, (event.clientY - box.top) * scale];
};
board.addEventListener("pointerdown", (event) => {
  board.setPointerCapture(event.pointerId);
  place = point(event);
  line(place);
});
board.addEventListener("pointermove", (event) => event.buttons && line(point(event)));
board.addEventListener("keydown", (event) => {
  const step = { ArrowLeft: [-8, 0], ArrowRight: [8, 0], ArrowUp: [0, -8], ArrowDown: [0, 8] }[event.key];
  if (!step) return;
  event.preventDefault();
  const to = place.map((value, axis) => Math.min(212, Math.max(12, value + step[axis])));
  if (event.shiftKey) line(to);
  else place = to;
});
at("clear").addEventListener("click", clear);
at("secret").addEventListener("submit", (event) => {
  event.preventDefault();
  explain();
});
clear();

at("parts").querySelectorAll("input").forEach((box, number) =>
  box.addEventListener("change", () => {
    if (box.checked) lost.delete(number);
    else lost.add(number);
    explain();
  }),
);
