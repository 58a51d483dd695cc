// The version beside the name becomes a menu of the versions of the site. They come from Read the Docs, or else from the
// file versions.json in the folder above this version (scripts/site_version.py writes it). Without either the version
// stays plain text.
(() => {
  const root = new URL(document.documentElement.dataset.content_root, location.href).href; // of this version

  // Link this page in another version, or its first page where it lacks this one.
  async function lead(link) {
    const page = location.href.slice(root.length);
    if (!location.href.startsWith(root) || new URL(link.href).origin !== location.origin) return;
    const there = await fetch(link.href + page, { method: "HEAD" }).catch(() => null);
    if (there && there.ok) link.href += page;
  }

  function show(versions) {
    const label = document.querySelector(".sidebar-brand-row > .version");
    const others = versions.filter((each) => each.url !== root);
    if (!label || !others.length) return;
    const menu = document.createElement("details");
    menu.className = "versions";
    const summary = menu.appendChild(document.createElement("summary"));
    summary.append(label.textContent.trim());
    summary.setAttribute("aria-label", `${label.textContent.trim()}: choose another version`);
    const list = menu.appendChild(document.createElement("ul"));
    const links = versions.map(({ name, url }) => {
      const link = list.appendChild(document.createElement("li")).appendChild(document.createElement("a"));
      link.textContent = name;
      link.href = url;
      if (url === root) link.setAttribute("aria-current", "true");
      return link;
    });
    menu.addEventListener("toggle", () => links.splice(0).forEach((link) => link.href !== root && lead(link)));
    menu.addEventListener("keydown", (event) => {
      if (event.key !== "Escape") return;
      menu.open = false;
      summary.focus();
    });
    document.addEventListener("click", (event) => menu.contains(event.target) || (menu.open = false));
    label.replaceWith(menu);
  }

  function showThoseOfReadTheDocs(data) {
    show(data.versions.active.map((each) => ({ name: each.slug, url: new URL(each.urls.documentation, root).href })));
  }

  async function showThoseOfTheFile() {
    const file = new URL("../versions.json", root);
    const answer = await fetch(file).catch(() => null);
    if (!answer || !answer.ok) return;
    const versions = await answer.json().catch(() => []);
    show(versions.map(({ version, name, url }) => ({ name: name || version, url: new URL(url, file).href })));
  }

  if (document.querySelector("meta[name=readthedocs-addons-api-version]")) {
    if (window.ReadTheDocsEventData) showThoseOfReadTheDocs(window.ReadTheDocsEventData.data());
    else document.addEventListener("readthedocs-addons-data-ready", (event) => showThoseOfReadTheDocs(event.detail.data()));
  } else if (location.protocol.startsWith("http")) showThoseOfTheFile();
})();
